"""Random numbers of a graph for inductor -> seeds, and numbers that are computed from a seed and their positions."""
from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch._inductor import config

from passes.compat import RANDOM_AT
from passes.op_rules.rule_table import packet_name
from passes.presets import annotate
from passes.tracing.joint_trace import JointTrace, joint_graphs


class Draws(nn.Linear):
    """Dropout twice, and numbers of other kinds."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(nn.functional.dropout(super().forward(x), 0.3).sin(), 0.2)
        return (h.double() + torch.randn(16, dtype=torch.float64) * torch.randint(0, 3, (16,))).sum()


def traced() -> JointTrace:
    (found,) = joint_graphs(Draws(), (torch.randn(4, 16),))
    return found


def calls(found: JointTrace, compiler: str) -> Counter[str]:
    annotate(found.gm, found.inputs, found.forward_outputs, compiler=compiler)
    return Counter(packet_name(node.target) for node in found.gm.graph.nodes if node.op == "call_function")


def test_numbers_of_fixed_sizes_are_drawn_at_their_positions():
    found = traced()
    counts = calls(found, "inductor")
    assert (counts["rand"], counts["randn"], counts["randint"]) == (0, 0, 1)
    assert (counts["inductor_seed"], counts["random_at"], counts["positions"]) == (3, 3, 2 * 2 + 1)
    order = [packet_name(node.target) for node in found.gm.graph.nodes if node.op == "call_function"]
    assert [name for name in order if name in ("inductor_seed", "randint")] == ["inductor_seed"] * 3 + ["randint"], "as traced"
    masks, normal = [node.args[1:] for node in found.gm.graph.nodes if node.target == RANDOM_AT][1:]
    assert [x.args for x in masks[1]] == [(4, 16), (16, 1)] and (normal[0], [x.args for x in normal[1]]) == ("randn", [(16, 1)])


def test_other_generators_draw_as_they_did():
    assert calls(traced(), "eager")["random_at"] == 0
    with config.patch(fallback_random=True):
        assert calls(traced(), "inductor")["random_at"] == 0
