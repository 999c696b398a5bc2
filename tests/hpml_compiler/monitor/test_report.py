"""Figures -> their text in the log and their TensorBoard scalars."""
from __future__ import annotations

import importlib.util

import pytest

from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.monitor.report import PredictedFigure, Report, compared, worst_of
from passes.errors import MissingDependency


def report(predicted_us=1000.0, measured_us=2000.0, **more):
    return Report(step=15, steps_measured=10, runs="graph_0 (1 forward, 1 backward)",
                  step_time=PredictedFigure("step time", predicted_us, measured_us), graphs_us=1500.0, optimizer_us=300.0,
                  between_us=200.0, **{"rival_us": 0.0, **more})


OFF = report(
    peak_memory=PredictedFigure("peak memory", 3 * 2**20, 6 * 2**20), memory_source="as measured",
    classes=compared({"matmul": 800.0, "collective": 100.0, "overhead": 0.0}, {"matmul": 900.0, "collective": 1050.0}),
    memory_parts=compared({"parameters": 2**20, "activations": 2 * 2**20}, {"parameters": 2**20, "activations": 5 * 2**20}),
)


@pytest.mark.parametrize(("predicted", "measured", "off"), [
    (100, 100, False), (125, 100, False), (75, 100, False), (126, 100, True), (74, 100, True), (0, 0, False), (1, 0, True),
])
def test_a_quarter_of_what_was_measured_is_the_limit(predicted, measured, off):
    assert PredictedFigure("", predicted, measured).is_off == off


def test_ratio_is_predicted_over_measured():
    assert PredictedFigure("", 1, 2).ratio == 0.5
    assert PredictedFigure("", 0, 0).ratio == 1.0
    assert PredictedFigure("", 1, 0).ratio == float("inf")


def test_the_worst_is_the_farthest_off_not_the_largest():
    assert worst_of(compared({"a": 100.0, "b": 1.0}, {"a": 101.0, "c": 5.0})).name == "c"


def test_the_line_has_both_figures_and_how_they_were_measured():
    line = OFF.text()
    for part in ("step 15", "predicted 1.00 ms, measured 2.00 ms (ratio 0.50", "predicted 3.00 MiB, measured 6.00 MiB",
                 "as measured", "1 forward, 1 backward", "10 steps"):
        assert part in line
    assert "not measured" in report().text()


def test_the_warning_names_the_class_that_is_off_with_both_figures():
    warning = OFF.time_warning()
    assert warning and "off by 50%" in warning
    assert "The largest part is collective: predicted 100 us, measured 1.05 ms" in warning
    assert "matmul 800 us / 900 us" in warning and "overhead" not in warning
    assert "The largest part is activations: predicted 2.00 MiB, measured 5.00 MiB" in (OFF.memory_warning() or "")


def test_no_warning_where_the_prediction_holds_or_nothing_was_measured():
    assert report(1000.0, 1100.0).time_warning() is None
    assert report().memory_warning() is None
    assert "is unknown" in (report().time_warning() or "")


def test_a_toy_s_steps_say_nothing_of_the_prices(monkeypatch):
    monkeypatch.undo()  # of conftest.py
    assert report(10.0, 5000.0).time_warning() is None
    assert report(50_000.0, 10.0).time_warning() is None
    assert "off by" in (report(10.0, 50_000.0).time_warning() or "")


@pytest.mark.parametrize(("measured", "rival_us", "warned"), [
    ({"matmul": 900.0, "collective": 100.0}, None, False),  # there was one mesh to choose from
    ({"matmul": 2700.0, "collective": 300.0}, 1.0, False),  # a busy machine: all is three times as slow
    ({"matmul": 900.0, "collective": 2000.0}, 100.0, True),  # collectives are 20 times as slow
    ({"matmul": 900.0, "collective": 2000.0}, 900.0, False),  # but what needs none of them would be far slower
    ({"matmul": 900.0, "collective": 2000.0, "overhead": 0.0}, 100.0, True),
    ({}, 100.0, True), ({}, 5000.0, False),  # nobody knows which work it is
])
def test_it_warns_where_correct_prices_could_have_led_to_another_plan(measured, rival_us, warned):
    classes = compared({"matmul": 900.0, "collective": 100.0}, measured) if measured else ()
    told = report(1000.0, sum(measured.values()) or 3000.0, classes=classes, rival_us=rival_us)
    assert bool(told.time_warning()) == warned
    assert "measured" in told.text()


def test_scalars():
    found = tensorboard_scalars.scalars(OFF)
    assert found["hpml/step_time_ms/predicted"] == 1.0 and found["hpml/step_time_ms/measured"] == 2.0
    assert found["hpml/step_time_ratio"] == 0.5 and found["hpml/peak_memory_MiB/measured"] == 6.0
    assert found["hpml/class_ms/collective/measured"] == 1.05
    assert "hpml/peak_memory_ratio" not in tensorboard_scalars.scalars(report())


def test_without_the_package_the_option_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install tensorboard"):
        tensorboard_scalars.open_writer("logs")


def test_scalars_can_be_read_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard_scalars.write(tensorboard_scalars.open_writer(str(tmp_path)), OFF)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert {tag: read.Scalars(tag)[0].value for tag in read.Tags()[
        "scalars"]} == pytest.approx(tensorboard_scalars.scalars(OFF))
    assert read.Scalars("hpml/step_time_ratio")[0].step == 15
