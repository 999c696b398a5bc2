"""Keep what is concatenated out of the result's memory, where others read it, too.

Inductor lets an operand of `cat` be computed into its stretch of the result, and whoever else reads the operand reads it there.
So the whole result is held as long as one operand is: of a U-Net's skip connection, until backward has come down again. Also,
it does not see then in which order of dims a convolution wants the result, and makes a copy of that. A product in between is
computed into the result instead, and nothing else is.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.base import TransformPass
from passes.compat import fake_mode_of
from passes.registry import register
from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class UnaliasCat(TransformPass):
    """Multiplies by one, which changes no bit, what is a call's result; a plain copy would be taken out again."""

    name = "unalias_cat"

    def run(self, graph_module: fx.GraphModule) -> bool:
        graph, changed = graph_module.graph, False
        fake_mode = fake_mode_of(graph_module)
        for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
            operands = list(cat.args[0])
            for k, x in enumerate(operands):
                if x.op == "call_function" and len(x.users) > 1 and x.meta["val"].is_floating_point():
                    operands[k] = CallInserter(graph, cat, fake_mode=fake_mode)(aten.mul.Tensor, x, 1)
                    changed = True
            cat.args = (operands, *cat.args[1:])
        return changed
