"""A joint graph whose second output gets no gradient: before -> after."""
from __future__ import annotations

import torch
from torch import fx, nn

from passes.compat import pytree
from passes.graph.graph_copy import copy_graph
from passes.transforms.cleanup.drop_tangents import DropTangents
from tests.passes.traced import trace_joint


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        y = self.layer(x)
        return y.square().mean(), y.tanh() + self.other(x)


def test_what_a_gradient_that_does_not_arrive_would_do_is_gone():
    torch.manual_seed(0)
    joint = trace_joint(_Two(), torch.randn(8, 4)).gm
    tangents = [n for n in joint.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    after = copy_graph(joint)
    assert DropTangents(frozenset({tangents[1].name}))(after).modified
    values = [torch.randn(n.meta["val"].shape) for n in joint.graph.find_nodes(op="placeholder")]
    zeros = [*values[:-1], torch.zeros_like(values[-1])]
    expected, found = (pytree.tree_leaves(fx.Interpreter(gm).run(*given), is_leaf=lambda x: x is None)
                       for gm, given in ((joint, zeros), (after, values)))
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    assert len(after.graph.nodes) < len(joint.graph.nodes) - 2
    (tangent,) = [n for n in after.graph.find_nodes(op="placeholder") if n.name == tangents[1].name]
    assert not tangent.users
