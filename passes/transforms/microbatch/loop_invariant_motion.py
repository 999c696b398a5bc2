"""Compute loop invariants once before the microbatch loop, for forward and backward of all microbatches.

A second gather in backward would also run before the loop: the parameter is unsharded all the time then anyway. Only a
parameter that each microbatch gathers (`passes.transforms.comm.repeat_gathers`) is gathered again in backward.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from passes.base import TransformPass
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE
from passes.registry import register
from passes.transforms.microbatch.loop_markers import COLLECTS, ENTERS


@register
@dataclass(frozen=True)
class MoveLoopInvariants(TransformPass):
    """Lets backward share calls that depend on no microbatch and no tangent with forward, so that `Deduplicate` merges them."""

    name = "move_loop_invariants"

    def run(self, graph_module: GraphModule) -> bool:
        later = set()
        changed = False
        for node in graph_module.graph.nodes:
            tangent = node.op == "placeholder" and node.name.startswith("tangents")
            if tangent or node.target in ENTERS or node.target in COLLECTS or later.intersection(node.all_input_nodes):
                later.add(node)
            elif node.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE:
                node.meta["partitioner_tag"] = "is_forward"
                changed = True
        return changed
