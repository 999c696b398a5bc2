"""Turn the arguments of a whole call into those of the call on local tensors.

Most operators need nothing: the local call on local operands gives the local result. Others register with their rule which
argument is a size (`sizes`), how their local call is made (`local`), or which strides their kernel needs (`layout`).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.base import Rule
from passes.op_rules.local_call import LocalCall, packed_copy
from passes.op_rules.rule_table import operator_of
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.shard_range import ShardRange


def localize(call: LocalCall, insert: CallInserter) -> Node:
    """Emit the local call; returns its node."""
    known = operator_of(call.target)
    if known.layout is not None:
        call = _packed(call, insert, known.layout)
    if known.local is not None:
        return known.local(call, insert)
    if call.ranges or call.ordered:
        dim = "an indexed dim" if call.ranges else "a dim of positions"
        raise AssertionError(f"{call.target}: its rule splits {dim}, but nothing registered with local= shifts them")
    if known.sizes is None:
        return call.unchanged(insert)
    before, after = call.args[:known.sizes], call.args[known.sizes + 1:]
    return insert(call.target, *before, list(call.local_shapes[0]), *after, **call.kwargs)


def _packed(call: LocalCall, insert: CallInserter, layout: Callable[[torch.Tensor], bool]) -> LocalCall:
    """Pack operands: collectives leave values in strides that the whole graph never had."""

    def pack(x: Any) -> Any:
        is_tensor = isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor)
        return packed_copy(insert, x) if is_tensor and not layout(x.meta["val"]) else x

    return replace(call, args=tuple(map(pack, call.args)), kwargs={k: pack(x) for k, x in call.kwargs.items()})


def shifted_ranges(
    rule: Rule | None, split: Callable[[bool, int, int], ShardRange | None]
) -> dict[int, ShardRange]:
    """Operand of indices -> this rank's range, for every indexed letter whose dim is split.

    `split(is_input, tensor, dim)` returns the range of a split dim, or None.
    """
    found: dict[int, ShardRange] = {}
    if rule is None:
        return found
    for letter, operand in rule.indexed.items():
        for is_input, tensors in ((True, rule.inputs), (False, rule.outputs)):
            for t, dims in enumerate(tensors):
                for d, row in enumerate(dims):
                    own = split(is_input, t, d) if letter in row else None
                    if own is not None:
                        found[operand] = own
    return found


def ordered_ranges(
    rule: Rule | None, split: Callable[[bool, int, int], ShardRange | None]
) -> dict[int, ShardRange]:
    """Dim of the first result -> this rank's range, for every ordered letter whose dim is split; `split` as above."""
    if rule is None or not rule.ordered:
        return {}
    ranges = {d: split(False, 0, d) for d, row in enumerate(rule.outputs[0]) if rule.ordered.intersection(row)}
    return {d: own for d, own in ranges.items() if own is not None}
