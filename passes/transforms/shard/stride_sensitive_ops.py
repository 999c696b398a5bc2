"""Local calls of operators that depend on the strides of operands, which a shard need not share with the whole."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
from torch.fx import Node

from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.local_call import LocalCall

aten = torch.ops.aten

FACTORS = {aten._linalg_det.default: 1, aten._linalg_slogdet.default: 2, aten._linalg_solve_ex.default: 1}
"""Operators that factorize the transpose of a contiguous operand -> index of the result with the factors. Backward was traced
for the strides of the whole operand."""


def factorization(call: LocalCall, insert: CallInserter) -> Node:
    """Make the local operand contiguous if the whole one was, and only then."""
    x, value = call.args[0], call.args[0].meta["val"]
    if call.strides:
        whole = _contiguous(call.global_shapes[FACTORS[call.target]], call.strides[0])
        if whole and not value.is_contiguous():
            x = insert(aten.clone.default, x, memory_format=torch.contiguous_format)
        elif not whole and value.is_contiguous():
            x = _by_columns(insert, x)
    return insert(call.target, x, *call.args[1:], **call.kwargs)


def scaled_mm(call: LocalCall, insert: CallInserter) -> Node:
    """The kernel requires packed rows of the first operand and packed columns of the second."""
    a, b, *rest = call.args
    if a.meta["val"].stride(1) != 1:
        a = insert(aten.clone.default, a, memory_format=torch.contiguous_format)
    if b.meta["val"].stride(0) != 1:
        b = _by_columns(insert, b)
    return insert(call.target, a, b, *rest, **call.kwargs)


def _by_columns(insert: CallInserter, x: Node) -> Node:
    """The same matrices in column-major order."""
    rank = x.meta["val"].dim()
    order = [*range(rank - 2), rank - 1, rank - 2]
    packed = insert(aten.clone.default, insert(aten.permute.default, x, order), memory_format=torch.contiguous_format)
    return insert(aten.permute.default, packed, order)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
