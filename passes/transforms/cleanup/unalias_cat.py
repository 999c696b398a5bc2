"""Keep concatenated operands with other readers out of the result's memory.

Inductor computes an operand of `cat` directly into its part of the result, and its other readers read it there.
So the whole result stays in memory as long as one operand does: for a U-Net's skip connection, until late in backward. Also,
inductor then does not know the memory format that a convolution expects, and copies the result. A product in between is
computed into the result instead, and the operand stays separate.
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
    """Multiplies such operands by one, which changes no bit; a plain copy would be optimized away."""

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
