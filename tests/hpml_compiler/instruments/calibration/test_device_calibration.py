"""Steps made with known efficiencies on a made-up device -> `hpml calibrate` finds these and writes a device file."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpml_compiler.cli import app
from hpml_compiler.instruments.calibration.device_calibration import (
    EFFICIENCIES,
    LINKS,
    calibrate,
    plan_row,
    simulated,
    with_parameters,
)
from hpml_compiler.instruments.calibration.measured_rows import MeasuredRow, read_rows
from passes.errors import BadInput
from passes.hardware.cluster import Cluster, DeviceSheet, builtin_sheet
from passes.json_records import FrozenMap

TRUE = {"matmul_efficiency": 0.4, "attention_efficiency": 0.5, "memory_efficiency": 0.7}
MODEL = '''
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self, width, pointwise):
        super().__init__()
        self.linear, self.pointwise = nn.Linear(width, width), pointwise

    def forward(self, x):
        x = self.linear(x) if not self.pointwise else x * self.linear.bias
        return x.relu().square().mean()

def products():
    return Wide(512, False), (torch.zeros(4096, 512),)

def pointwise():
    return Wide(512, True), (torch.zeros(1 << 15, 512),)

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def layers():
    return Deep(), (torch.zeros(512, 64),)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A made-up device (with slow arithmetic and memory, so that launches do not count) and rows of two models."""
    folder = tmp_path_factory.mktemp("calibrate")
    sheet = builtin_sheet("a100-80g")
    device = replace(sheet.device, name="toy", memory_bandwidth_bytes_per_s=2e10,
                     peak_flops_per_s=FrozenMap({"float32": 1e12}))
    replace(sheet, device=device).save(folder / "toy.json")
    (folder / "models.py").write_text(MODEL)
    rows = []
    for name in ("products", "pointwise"):
        row = {"name": name, "target": "models.py:" + name, "cluster": f"1x2:{folder / 'toy.json'}", "mesh": {"dp": 2},
               "seconds": 1.0}
        rows.append(row)
    (folder / "rows.json").write_text(json.dumps(rows))
    parsed = read_rows(folder / "rows.json")
    for row, each in zip(rows, parsed):
        cluster = with_parameters(Cluster.parse(each.cluster), TRUE)
        row["seconds"] = simulated(plan_row(each), cluster, each)
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder


def test_the_command_finds_the_efficiencies_that_the_steps_were_made_with(folder):
    arguments = ["calibrate", str(folder / "rows.json"), "--save", str(folder / "fitted.json"), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    report = json.loads(result.stdout)
    for row in report["rows"]:
        assert abs(row["error"]) < 0.02 < abs(row["before_s"] / row["measured_s"] - 1)
        assert abs(row["leave_one_out_error"]) > abs(row["error"])  # each row alone says little of the other
    fitted = {name: each["fitted"] for name, each in report["parameters"].items()}
    assert fitted["matmul_efficiency"] == pytest.approx(0.4, rel=0.05)
    assert fitted["memory_efficiency"] == pytest.approx(0.7, rel=0.05)
    assert fitted["attention_efficiency"] == 0.5 and report["parameters"]["attention_efficiency"]["informed"] == 0.0
    saved = DeviceSheet.load(folder / "fitted.json").device
    assert {name: getattr(saved, name) for name in TRUE} == pytest.approx(fitted)
    assert "calibrated on products, pointwise" in saved.source
    assert Cluster.parse(f"1x2:{folder / 'fitted.json'}").device == saved


def test_what_a_row_recomputes_takes_time(folder):
    saved, recomputed = (plan_row(MeasuredRow(
        name=how, target=f"{folder / 'models.py'}:layers", cluster=f"1x2:{folder / 'toy.json'}", mesh={"dp": 2}, seconds=1.0,
        options={"recompute": how})) for how in ("none", "full"))
    longer_us = recomputed.predicted.step_time_us - saved.predicted.step_time_us
    little_us, again_us = (plan.graphs[0].predicted.again_us for plan in (saved, recomputed))
    assert again_us - little_us == pytest.approx(longer_us) and again_us > 100 * little_us
    assert recomputed.memory.activations < saved.memory.activations


def test_the_table_names_rows_and_parameters(folder):
    result = CliRunner().invoke(app, ["calibrate", str(folder / "rows.json"), "--fit", "matmul_efficiency"],
                                catch_exceptions=False)
    assert all(word in result.stdout for word in ("device toy", "products", "pointwise", "matmul_efficiency"))
    assert "memory_efficiency" not in result.stdout


# --- with plans and a step time of the test's own: what is fitted to what ---------------------------------------------


def rows_of(*seconds: float, held_out: int = 0, cluster: str = "1x2:a100-80g") -> list[MeasuredRow]:
    count = len(seconds)
    return [MeasuredRow(name=f"r{i}", target="m.py:f", cluster=cluster, mesh={"dp": 2}, seconds=s,
                        held_out=i >= count - held_out)
            for i, s in enumerate(seconds)]


def step_time(plan, cluster: Cluster, row: MeasuredRow) -> float:
    """A step that takes a second of matrix products at efficiency 1."""
    return 1.0 / cluster.device.matmul_efficiency


def test_a_row_held_out_is_reported_and_fitted_to_by_none():
    found = calibrate(rows_of(2.0, 2.0, 9.0, held_out=1), [None] * 3, step_time=step_time)  # type: ignore[list-item]
    report = found.to_json()
    assert found.fit.values["matmul_efficiency"] == pytest.approx(0.5, rel=0.02)
    last = report["rows"][-1]
    assert last["held_out"] and last["leave_one_out_s"] is None
    assert last["error"] == pytest.approx(2.0 / 9.0 - 1, abs=0.01)
    assert report["mean_held_out_error"] == abs(last["error"])
    assert report["mean_error"] == pytest.approx(0.0, abs=0.02)


def test_before_is_with_the_built_in_figures():
    (report,) = calibrate(rows_of(2.0), [None], step_time=step_time).rows  # type: ignore[list-item]
    assert report.before_s == 1.0 / builtin_sheet("a100-80g").device.matmul_efficiency
    assert report.left_out_s is None


def test_links_are_fitted_only_where_rows_are_many():
    few = calibrate(rows_of(2.0, 2.0), [None] * 2, step_time=step_time)  # type: ignore[list-item]
    many = calibrate(rows_of(*[2.0] * 6), [None] * 6, step_time=step_time)  # type: ignore[list-item]
    assert set(few.fit.values) == set(EFFICIENCIES)
    assert set(many.fit.values) == {*EFFICIENCIES, *LINKS}


def test_a_link_can_be_fitted():
    def by_link(plan, cluster: Cluster, row: MeasuredRow) -> float:
        return 1.0 / cluster.inter_node.efficiency

    found = calibrate(rows_of(2.0), [None], names=["inter_node.efficiency"], step_time=by_link)  # type: ignore[list-item]
    assert found.sheet.inter_node.efficiency == pytest.approx(0.5, rel=0.05)
    assert found.sheet.intra_node == builtin_sheet("a100-80g").intra_node


def test_rows_of_two_devices_are_refused():
    rows = rows_of(2.0) + rows_of(2.0, cluster="1x2:h100-80g")
    with pytest.raises(BadInput, match="h100-80g, not a100-80g"):
        calibrate(rows, [None] * 2, step_time=step_time)  # type: ignore[list-item]


def test_an_unknown_parameter_is_refused():
    with pytest.raises(BadInput, match="'speed' is no parameter") as caught:
        calibrate(rows_of(2.0), [None], names=["speed"], step_time=step_time)  # type: ignore[list-item]
    assert "matmul_efficiency" in caught.value.next_step


def test_only_held_out_rows_leave_nothing_to_fit():
    with pytest.raises(BadInput, match="nothing to fit"):
        calibrate(rows_of(2.0, held_out=1), [None], step_time=step_time)  # type: ignore[list-item]
