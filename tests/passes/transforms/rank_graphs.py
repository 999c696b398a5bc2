"""Graphs of one of two ranks, built call by call."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes import compat
from passes.base import TransformPass
from tests.passes.transforms.ranks import groups_of, run

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GROUP = "axis0"


class RankGraph:
    """Calls are of backward unless `tag` says otherwise."""

    def __init__(self):
        self.graph = fx.Graph()
        self.fake_mode = compat.tracing_fake_mode()
        self.shapes: list[tuple[int, ...]] = []

    def operand(self, *shape: int, name: str = "") -> fx.Node:
        node = self.graph.placeholder(name or f"x{len(self.shapes)}")
        self.shapes.append(shape)
        with self.fake_mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target: Any, *args: Any, tag: str = "is_backward") -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["partitioner_tag"] = tag
        with self.fake_mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def all_reduce(self, x: fx.Node, **tag: str) -> fx.Node:
        return self.call(c10d.wait_tensor.default, self.call(c10d.all_reduce.default, x, "sum", GROUP, **tag), **tag)

    def all_gather(self, x: fx.Node, **tag: str) -> fx.Node:
        started = self.call(c10d.all_gather_into_tensor.default, x, 2, GROUP, **tag)
        return self.call(c10d.wait_tensor.default, started, **tag)

    def reduce_scatter(self, x: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, self.call(c10d.reduce_scatter_tensor.default, x, "sum", 2, GROUP))

    def outputs(self, *nodes: fx.Node) -> RankGraph:
        self.graph.output(list(nodes))
        return self

    def graph_module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph)


def names_after(build: RankGraph, changed_by: TransformPass) -> list[str]:
    """The functions called after a pass; that both ranks still get the same values is checked."""
    groups = groups_of((2,))
    inputs = [[torch.randn(shape) for shape in build.shapes] for _ in groups]
    expected = run([build.graph_module()] * 2, groups, inputs)
    gm = build.graph_module()
    changed_by.run(gm)
    gm.graph.lint()
    torch.testing.assert_close(run([gm] * 2, groups, inputs), expected)
    return [n.target.__name__.split(".")[0] for n in gm.graph.nodes if callable(n.target)]
