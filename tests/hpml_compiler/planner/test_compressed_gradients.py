"""Plans with compressed gradients: bytes, cost and words beside those without."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.options import Options
from passes.errors import BadInput


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def planned(**options: Any) -> Any:
    return hpml_compiler.plan(Mlp(), (torch.randn(16, 64),), cluster="2x2:a100-40g", zero=0, **options)


def gradients(plan: Any) -> dict[str, tuple[int, int, str]]:
    """By axis: bytes of the reductions of gradients, what they would be whole, and their compression."""
    found: dict[str, tuple[int, int, str]] = {}
    for move in plan.graphs[0].redistributions:
        for hop in move.hops:
            if not move.consumer and hop.bytes:
                nbytes, whole, _ = found.get(hop.axis, (0, 0, ""))
                found[hop.axis] = nbytes + hop.bytes, whole + (hop.whole_bytes or hop.bytes), hop.compression
    return found


def test_half_of_the_bytes_are_planned_and_named():
    plain, half = planned(mesh={"dp": 4}), planned(mesh={"dp": 4}, compress="bf16")
    (nbytes, whole, _), (sent, _, compression) = gradients(plain)["dp"], gradients(half)["dp"]
    assert (whole, sent, compression) == (nbytes, nbytes // 2, "bf16")
    assert half.predicted.communication_us < plain.predicted.communication_us
    assert "gradients in bf16" in str(half.table(140)) and "gradients in" not in str(plain.table(140))
    assert "in bf16 instead of" in half.explain("up.weight")
    assert Options.parse({"plan": half}).with_plan(4).compress == {"dp": "bf16"}


@pytest.mark.parametrize(("compress", "axes"), [("bf16", {"dp"}), ({"*": "fp16"}, {"dp", "tp"})])
def test_only_axes_between_nodes_unless_others_are_named(compress, axes):
    plan = planned(mesh={"dp": 2, "tp": 2}, compress=compress)
    assert {axis for axis, (_, _, found) in gradients(plan).items() if found} == axes & gradients(plan).keys()


def test_an_axis_must_be_of_the_mesh_and_a_node_must_end(caplog):
    with pytest.raises(BadInput, match="'dp' is no axis of the mesh"):
        planned(compress={"dp": "bf16"})
    hpml_compiler.plan(Mlp(), (torch.randn(16, 64),), cluster="1x2:a100-40g", mesh={"dp": 2}, compress="bf16")
    assert "gradients are not compressed: no axis of the mesh dp=2 crosses nodes" in caplog.text
