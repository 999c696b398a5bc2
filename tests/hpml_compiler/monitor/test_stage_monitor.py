"""Pipelined training steps -> measured times of each stage on all ranks, beside the predicted ones."""
from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.monitor import report as report_of_a_run
from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.monitor.report import PredictedFigure
from hpml_compiler.monitor.stage_monitor import (
    STAGES_ARE_MEASURED,
    OwnSteps,
    StageFigures,
    StageMonitor,
    StagesReport,
    report_of,
    say,
)
from hpml_compiler.runtime.process.device_clock import HostClock
from hpml_compiler.runtime.program.stage_timer import loop_times
from passes.errors import BadInput
from passes.json_records import FrozenMap
from passes.pipeline.pipeline_schedule import ScheduleAction, make_schedule
from passes.pipeline.stage_assignment import StageAssignment
from tests.hpml_compiler.compile.test_pipeline_parallel import Tied, batch

CUT = StageAssignment(2, FrozenMap({}), frozenset(), (), FrozenMap({}), frozenset(), FrozenMap({}), (("a",), ("b",)),
                      (30.0, 30.0),
                      (10.0, 10.0))
ONE = StageAssignment(1, FrozenMap({}), frozenset(), (), FrozenMap({}), frozenset(), FrozenMap({}), (("a",),), (30.0,), (10.0,))


def test_figures_of_a_schedule_that_goes_as_predicted_are_the_predicted_ones():
    # 1F1B of 2 stages, 4 microbatches, 10 µs forward, 20 backward: (m + p - 1) * 30 µs, of which each rank works 4 * 30.
    own = [OwnSteps(rank, {(rank, "forward"): 10.0, (rank, "backward"): 20.0}, (120.0,) * 3, (150.0,) * 3, 7)
           for rank in (0, 1)]
    report = report_of("graph", make_schedule("1f1b", 2, 4, 1), CUT, own)
    assert report.loop == PredictedFigure("loop", 150.0, 150.0)
    assert (report.bubble.predicted, report.bubble.measured) == (pytest.approx(0.2), pytest.approx(0.2))
    assert [each.work.ratio for each in report.stages] == [1.0, 1.0]
    assert (report.steps_measured, report.sent_bytes, report.warning()) == (3, 14, None)


def test_a_stage_that_several_ranks_share_takes_what_its_slowest_takes():
    def own(rank, us):
        return OwnSteps(rank, {(rank, "forward"): us, (rank, "backward"): 20.0}, (4 * us + 80.0,), (200.0,), 0)

    report = report_of("graph", make_schedule("1f1b", 2, 4, 1), CUT, [own(0, 10.0), own(0, 14.0), own(1, 10.0), own(1, 11.0)])
    assert [each.forward.measured for each in report.stages] == [14.0, 11.0]
    assert report.bubble.measured == pytest.approx(1 - (120 + 136 + 120 + 124) / (4 * 200))


def test_a_rank_that_has_more_of_the_work_than_it_was_given_is_named():
    def figures(stage, forward, backward):
        return StageFigures(stage, stage, PredictedFigure("forward", 10.0, forward),
                            PredictedFigure("backward", 20.0, backward))

    even = StagesReport("graph", 5, (figures(0, 100.0, 200.0), figures(1, 100.0, 210.0)), PredictedFigure("loop", 150.0, 15e3),
                        PredictedFigure("bubble", 0.2, 0.2), 0)
    assert even.warning() is None  # all is ten times slower, which another cut would not mend
    uneven = replace(even, stages=(figures(0, 100.0, 200.0), figures(1, 300.0, 400.0)))
    said = uneven.warning()
    assert said is not None and "rank 1 of the pipeline has 70% of the work of all stages, instead of the predicted 50%" in said
    assert replace(uneven, loop=PredictedFigure("loop", 150.0, report_of_a_run.SHORT_US / 2)).warning() is None


class LossOutside(Tied):
    """The script computes the loss."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels)[1]


def _trained(rank, model, schedule, steps=STAGES_ARE_MEASURED):
    hpml_compiler.reset()
    heard = []
    log = logging.getLogger("hpml")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    module = model()
    call = torch.compile(module, backend="hpml", options={
        "mesh": {"pp": 2}, "compiler": "eager", "microbatches": 4, "schedule": schedule})
    with pytest.raises(BadInput, match="train for 8 steps"):
        hpml_compiler.last_stages()
    tokens, labels = batch()
    for step in range(steps):
        found = call(tokens, labels)
        (found[0] if isinstance(found, tuple) else F.cross_entropy(found, labels)).backward()
        if step == 3:  # an evaluation is no step
            with torch.no_grad():
                call(tokens, labels)
    log.removeHandler(handler)
    assert hpml_compiler.last_report().step_time == hpml_compiler.last_stages().loop
    return hpml_compiler.last_stages(), [text for text in heard if "the pipeline takes" in text]


def test_ranks_measure_their_stages_and_know_the_same(launch):
    outside = LossOutside, "gpipe", STAGES_ARE_MEASURED + 2  # the loss becomes part of the step after two of them
    cases = [(Tied, "1f1b"), (Tied, "zero_bubble"), outside]
    for (report, said), (other, unsaid) in zip(*launch(_all_trained, 2, (cases,)), strict=True):
        assert report == other and len(said) == 1 and not unsaid
        assert report.steps_measured == 5 and [each.rank for each in report.stages] == [0, 1]
        for each in report.stages:
            assert min(each.forward.predicted, each.forward.measured, each.backward.predicted, each.backward.measured) > 0
        assert 0 < report.bubble.measured < 1 and report.sent_bytes > 0
        found = report.scalars()
        assert found["hpml/pipeline/bubble/measured"] == report.bubble.measured and len(found) == 4 + 2 * 4


def _all_trained(rank, cases):
    assert unmonitored() == "no stages were measured yet"
    return [_trained(rank, *case) for case in cases]


def unmonitored():
    hpml_compiler.reset()
    call = torch.compile(Tied(), backend="hpml", options={"mesh": {"pp": 2}, "compiler": "eager", "microbatches": 2,
                                                          "monitor": False})
    for _ in range(STAGES_ARE_MEASURED):
        call(*batch())[0].backward()
    try:
        hpml_compiler.last_stages()
    except BadInput as error:
        return error.what


def test_steps_that_failed_do_not_count_and_without_any_there_is_no_report():
    table, found = make_schedule("1f1b", 1, 1, 1), []
    watch = StageMonitor("graph", table, 0, ONE, HostClock(), lambda own: [own], found.append)

    def call(fails):
        if fails:
            raise ValueError("broken on purpose")
        if (times := loop_times()) is None:  # the last call, at which it is told
            return
        for kind in ("forward", "backward"):
            with times.action(ScheduleAction(kind, 0, 0)):
                pass
        times.end()

    forward = watch.forward(call)
    for number in range(STAGES_ARE_MEASURED):
        with pytest.raises(ValueError) if number == 4 else nullcontext():
            forward(number == 4)
    assert [report.steps_measured for report in found] == [4]
    none = StageMonitor("graph", table, 0, ONE, HostClock(), lambda own: [own], found.append)
    for _ in range(STAGES_ARE_MEASURED):
        none.forward(lambda: None)()
    assert len(found) == 1


def test_a_full_disk_does_not_end_the_run(monkeypatch, caplog):
    def full(folder):
        raise OSError("no space left on device")

    monkeypatch.setattr(tensorboard_scalars, "open_writer", full)
    own = [OwnSteps(rank, {(rank, "forward"): 10.0, (rank, "backward"): 20.0}, (120.0,), (150.0,), 7) for rank in (0, 1)]
    with caplog.at_level(logging.ERROR, "hpml"):
        say(report_of("graph", make_schedule("1f1b", 2, 4, 1), CUT, own), "folder")
    assert "no space left on device" in caplog.text


def test_rank_0_writes_scalars(monkeypatch):
    class Writer:
        written, closed = [], False

        def add_scalar(self, tag, value, step):
            self.written.append((tag, value, step))

        def flush(self):
            pass

        def close(self):
            self.closed = True

    writer = Writer()
    monkeypatch.setattr(tensorboard_scalars, "open_writer", lambda folder: writer)
    own = [OwnSteps(rank, {(rank, "forward"): 10.0, (rank, "backward"): 20.0}, (120.0,), (150.0,), 7) for rank in (0, 1)]
    say(report_of("graph", make_schedule("1f1b", 2, 4, 1), CUT, own), "folder", 7)
    assert ("hpml/pipeline/loop_ms/measured", 0.15, 7) in writer.written and writer.closed
