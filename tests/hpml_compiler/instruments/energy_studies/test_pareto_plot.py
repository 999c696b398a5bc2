"""Points before -> a picture of them after."""
from __future__ import annotations

import re

import pytest

from hpml_compiler.instruments.energy_studies.pareto_front import Sweep
from hpml_compiler.instruments.energy_studies.pareto_plot import draw
from passes.errors import BadInput
from tests.hpml_compiler.instruments.energy_studies.test_pareto_front import point


def texts(sweep: Sweep, path) -> list[str]:
    """The texts of an SVG, which matplotlib writes as comments beside their outlines."""
    draw(sweep, path)
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_the_front_is_labelled_with_mesh_and_cap_and_the_legend_says_the_rest(tmp_path):
    sweep = Sweep("1x4:a100-80g", (
        point(0.1, 8.0), point(0.2, 4.0, power_cap_w=200.0), point(0.2, 9.0, devices=1, mesh={}),
        point(0.25, 4.0, devices=2, mesh={"x": 2}, power_cap_w=150.0)))
    found = texts(sweep, tmp_path / "front.svg")
    for text in ("x=4, no cap", "x=4, 200 W", "4 devices", "2 devices", "1 device", "cap 150 W", "no cap",
                 "1x4:a100-80g: time and energy (estimated)", "time of a step (ms)"):
        assert text in found
    assert not any("not shown" in text for text in found)
    assert "one device, no cap" not in found and "x=2, 150 W" not in found


def test_what_is_much_worse_than_the_front_is_counted_and_not_drawn(tmp_path):
    front = (point(1.0, 20e3), point(2.0, 10e3))
    found = texts(Sweep("c", (*front, point(9.0, 10e3, devices=7), point(1.0, 90e3, devices=5))), tmp_path / "front.svg")
    assert {"2 worse plans", "time of a step (s)", "energy of a step, all devices (kJ)"} <= set(found)
    assert not {"7 devices", "5 devices"} & set(found)


def test_points_on_top_of_each_other_have_one_label_between_them(tmp_path):
    close = tuple(point(1.0 + 1e-4 * i, 5.0 - 1e-4 * i, mesh={f"a{i}": 4}) for i in range(5))
    found = texts(Sweep("1x4:cpu", (*close, point(2.0, 1.0, mesh={"far": 4}))), tmp_path / "front.svg")
    assert [text for text in found if text.endswith("=4, no cap")] == ["a0=4, no cap", "far=4, no cap"]


def test_steps_of_very_different_length_are_drawn_on_a_logarithmic_axis(tmp_path):
    near = texts(Sweep("c", (point(1.0, 2.0), point(2.0, 1.0))), tmp_path / "near.svg")
    far = texts(Sweep("c", (point(1.0, 2.0), point(90.0, 1.0))), tmp_path / "far.svg")
    assert "50" not in near and {"1", "10", "50"} <= set(far)


@pytest.mark.parametrize("name", ["front.xyz", "front", "nowhere/front.png"])
def test_a_file_that_cannot_be_drawn_is_an_error_that_says_so(tmp_path, name):
    with pytest.raises(BadInput, match="cannot"):
        draw(Sweep("c", (point(1.0, 2.0),)), tmp_path / name)
