"""Forward's part of backward before -> among forward's calls after."""
from __future__ import annotations

import torch
from torch import nn

from passes.transforms.memory.hoist_to_forward import HoistToForward
from tests.passes.traced import joint_graph


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.sin(self.up(x))).square().sum()


def test_what_backward_computes_of_forwards_values_alone_moves_to_where_they_are_made():
    gm, _ = joint_graph(Model(), (torch.ones(2, 4),))
    names = [node.name for node in gm.graph.nodes]
    (cos,) = (node.name for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default))
    (sin,) = (node.name for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))
    assert names.index(cos) > names.index("sum_1") and HoistToForward()(gm).modified
    gm.graph.lint()
    after = [node.name for node in gm.graph.nodes]
    assert sorted(after) == sorted(names)
    assert abs(after.index(cos) - after.index(sin)) == 1, "both read what the layer before makes"


def test_forwards_own_calls_stay_in_their_order():
    gm, forward_outputs = joint_graph(Model(), (torch.ones(2, 4),))
    names = [node.name for node in gm.graph.nodes]
    own = names[: names.index("sum_1") + 1]
    HoistToForward()(gm)
    assert [name for name in (node.name for node in gm.graph.nodes) if name in own] == own
