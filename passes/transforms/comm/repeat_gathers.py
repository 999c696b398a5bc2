"""Gather sharded parameters in each microbatch, instead of once before the loop.

A marker between the shard and its gather moves the gather, and all that is computed from it, into the loop's body: the shard is
what enters it. Gathers of forward and of backward stay two, so that nothing whole is saved in between.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.registry import register
from passes.transforms.comm.param_gathers import find_gathers
from passes.transforms.microbatch.loop_markers import AGAIN
from passes.transforms.rewriting.call_inserter import CallInserter


@register
@dataclass(frozen=True)
class RepeatGathers(TransformPass):
    """parameters: placeholders whose gathers each microbatch runs (`passes.sharding.loop_gathers`)."""

    name = "repeat_gathers"

    parameters: frozenset[str] = frozenset()

    def run(self, graph_module: GraphModule) -> bool:
        changed = False
        for each in find_gathers(graph_module) if self.parameters else ():
            shard = each.start.args[0]
            root = each.lead[0].all_input_nodes[0] if each.lead else shard
            if root.name in self.parameters:
                insert = CallInserter(graph_module.graph, each.start, fake_mode=fake_mode_of(graph_module))
                each.start.replace_input_with(shard, insert(AGAIN, shard))
                changed = True
        return changed
