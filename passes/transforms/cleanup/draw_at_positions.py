"""Draw random numbers by their positions, so that each rank and each microbatch can draw its own part.

    rand(sizes)   ->   random_at(seed, "rand", [positions(size, stride) of each dim])

Seeds are drawn in the order of the random numbers, whole on every rank, as inductor draws them for one device. Numbers then
depend on seed and positions alone: they can be split like any value, and computed again in backward.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes import compat
from passes.base import TransformPass
from passes.compat import POSITIONS, RANDOM_AT, fake_mode_of
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

aten, prims = torch.ops.aten, torch.ops.prims
MODES = {aten.rand.default: "rand", aten.rand.generator: "rand", aten.randn.default: "randn", aten.randn.generator: "randn"}


@register
@dataclass(frozen=True)
class DrawAtPositions(TransformPass):
    """For graphs that inductor compiles. Numbers of data-dependent sizes, and integers, stay as they are: each rank draws them
    all."""

    name = "draw_at_positions"

    def run(self, graph_module: GraphModule) -> bool:
        graph, fake_mode = graph_module.graph, fake_mode_of(graph_module)
        drawn = [node for node in graph.nodes if node.target in MODES and _has_fixed_sizes(node)]
        if not drawn or not compat.draws_at_positions():
            return False
        for node in drawn:
            _rewrite(node, CallInserter(graph, node, fake_mode=fake_mode))
        graph.lint()
        graph_module.recompile()
        return True


def _has_fixed_sizes(node: Node) -> bool:
    value, dtype = node.meta["val"], node.kwargs.get("dtype") or torch.float32
    plain = node.kwargs.get("generator") is None and not node.kwargs.get("pin_memory")
    return (plain and value.dtype == dtype and value.is_contiguous()
            and all(isinstance(size, int) and size > 0 for size in value.shape))


def _rewrite(node: Node, insert: CallInserter) -> None:
    value = node.meta["val"]
    place = {"dtype": torch.int32 if value.numel() < 2**31 else torch.int64, "device": value.device}
    positions = [insert(POSITIONS, size, math.prod(value.shape[d + 1:]), **place) for d, size in enumerate(value.shape)]
    drawn = insert(RANDOM_AT, insert(compat.seed_operator(), value.device), MODES[node.target], positions)
    if value.dtype != torch.float32:
        drawn = insert(prims.convert_element_type.default, drawn, value.dtype)
    node.replace_all_uses_with(drawn)
    node.graph.erase_node(node)
