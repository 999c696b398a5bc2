"""A model, a cluster, caps and numbers of devices before -> a point for each plan after."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

import hpml_compiler
from hpml_compiler.cli import main
from hpml_compiler.instruments.energy_studies.plan_sweep import default_caps, default_counts, part_of, sweep
from hpml_compiler.options import Options
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster, builtin_sheet
from tests.hpml_compiler.instruments.energy_studies.models import mlp

CLUSTER = Cluster.parse("1x4:a100-80g")
TARGET = f"{Path(__file__).parent / 'models.py'}:mlp"


@pytest.fixture(scope="module")
def found():
    return sweep(*mlp(), CLUSTER, caps=[None, 250.0, 120.0], counts=[4, 2])


def test_every_case_has_a_point(found):
    cases = {(p.devices, tuple(p.mesh.items()), p.power_cap_w, p.objective) for p in found.points}
    meshes = {(4, (("x", 4),)), (4, (("x", 2), ("y", 2))), (2, (("x", 2),))}
    assert cases == {(*mesh, cap, objective) for mesh in meshes for cap in (None, 250.0, 120.0)
                     for objective in ("time", "energy")}
    assert len(found.points) == len(cases) and not found.missed


def test_on_one_mesh_under_one_cap_each_objective_is_best_at_its_own(found):
    pairs = {}
    for p in found.points:
        pairs.setdefault((p.devices, tuple(p.mesh.items()), p.power_cap_w), {})[p.objective] = p
    for pair in pairs.values():
        assert pair["time"].step_time_s <= pair["energy"].step_time_s * (1 + 2e-3)  # the gap of the solver, twice
        assert pair["energy"].energy_j <= pair["time"].energy_j * (1 + 2e-3)


def test_a_lower_cap_is_never_faster_and_no_device_draws_more_than_it(found):
    for p in found.points:
        assert p.power_w <= (p.power_cap_w or CLUSTER.device.busy_power_w) * 1.1  # the links' energy is beside the device
        assert p.energy_j == pytest.approx(p.power_w * p.devices * p.step_time_s)
    times = {cap: min(p.step_time_s for p in found.points if p.power_cap_w == cap) for cap in (None, 250.0, 120.0)}
    assert times[None] <= times[250.0] <= times[120.0]


def test_the_front_has_both_ends(found):
    front = found.front
    assert front[0].step_time_s == min(p.step_time_s for p in found.points)
    assert front[-1].energy_j == min(p.energy_j for p in found.points)


def test_plans_that_do_not_fit_are_listed_and_none_at_all_is_an_error():
    with pytest.raises(Infeasible) as caught:
        hpml_compiler.plan(*mlp(), cluster="1x1:a100-80g", memory_budget=64)
    least = round(caught.value.smallest_budget_bytes or 0)
    options = Options.parse({"memory_budget": least - 1})  # two devices hold less each
    some = sweep(*mlp(), CLUSTER, options, caps=[None], counts=[2, 1])
    assert {p.devices for p in some.points} == {2} and {m.devices for m in some.missed} == {1}
    assert all("needs at least" in m.reason for m in some.missed)
    with pytest.raises(Infeasible):
        sweep(*mlp(), CLUSTER, Options.parse({"memory_budget": 64}), caps=[None], counts=[1])


def test_a_pinned_mesh_is_the_only_one():
    only = sweep(*mlp(), CLUSTER, Options.parse({"mesh": {"dp": 2, "tp": 2}}), caps=[None])
    assert [p.mesh for p in only.points] == [{"dp": 2, "tp": 2}] * 2
    with pytest.raises(BadInput, match="ranks"):
        sweep(*mlp(), CLUSTER, Options.parse({"mesh": {"dp": 2}}), caps=[None], counts=[4])


def test_bad_caps_are_refused_before_anything_is_planned():
    told = []
    with pytest.raises(BadInput, match="leaves nothing to compute with"):
        sweep(*mlp(), CLUSTER, caps=[None, 10.0], progress=told.append)
    assert not told
    with pytest.raises(BadInput, match="nothing to plan"):
        sweep(*mlp(), CLUSTER, caps=[], counts=[1])


def test_parts_of_a_cluster_are_whole_nodes_or_inside_of_one():
    cluster = Cluster.parse("4x8:a100-80g")
    assert [str(part_of(cluster, n)) for n in (32, 16, 8, 3)] == [
        "4x8:a100-80g", "2x8:a100-80g", "1x8:a100-80g", "1x3:a100-80g"]
    for count in (0, 12, 64):
        with pytest.raises(BadInput, match="no part of"):
            part_of(cluster, count)
    assert default_counts(cluster) == [32, 16, 8, 4]
    assert default_counts(Cluster.parse("3x4:a100-80g")) == [12]
    assert default_counts(Cluster.parse("1x1:cpu")) == [1]


@pytest.mark.parametrize("name", ["cpu", "a100-80g", "h100-80g", "l4-24g"])
def test_default_caps_are_possible_and_none_comes_first(name):
    device = builtin_sheet(name).device
    first, *caps = default_caps(device)
    assert first is None and len(caps) >= 3
    assert all(device.idle_power_w < cap < device.busy_power_w for cap in caps)


def test_the_command_prints_points_and_draws_them(capsys, tmp_path):
    picture = tmp_path / "front.png"
    with pytest.raises(SystemExit) as end:
        main(["pareto", TARGET, "--cluster", "1x2:a100-80g", "--caps", "none,200W", "--devices", "2", "--json",
              "--save", str(picture)])
    assert not end.value.code
    found = json.loads(capsys.readouterr().out)
    assert len(found["points"]) == 4 and any(p["on_front"] for p in found["points"])
    assert {p["energy_label"] for p in found["points"]} == {"estimated"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_the_front_as_a_table(capsys):
    with pytest.raises(SystemExit) as end:
        main(["pareto", TARGET, "--cluster", "1x2:a100-80g", "--caps", "200", "--fix", "dp=2"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert "of 2 plans on 1x2:a100-80g are Pareto-optimal" in text and "dp=2" in text and "200 W" in text


@pytest.mark.parametrize(("arguments", "message"), [
    (["--caps", "much"], "not a power"), (["--caps", "20"], "leaves nothing"), (["--devices", "two"], "not a list of numbers"),
    (["--devices", "3,9"], "no part of"), (["--fix", "objective=energy"], "both are planned"),
    (["--fix", "power_cap=300"], "--caps"),
])
def test_the_command_refuses_what_it_cannot_sweep(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["pareto", TARGET, "--cluster", "1x4:a100-80g", *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err
