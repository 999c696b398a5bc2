"""One call on local tensors: what a local call is made from, and the helpers that families make theirs with.

Most operators need nothing: the same call on local operands gives the local result. Others register `sizes=` or `local=`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node

from passes.op_rules.base import Rule

aten = torch.ops.aten
Insert = Callable[..., Node]
"""`insert(target, *args, **kwargs)` adds a call to the rank's graph; returns its node, with the fake value in `meta["val"]`."""


class LocalRange(Protocol):
    """A rank's range of a split dim: `count` elements from `first` on."""

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    def marked(self, node: Node) -> Node:
        """Mark a call that has the start among its constants."""
        ...

    def asked(self, insert: Insert, device: torch.device) -> Node | int:
        """The start, computed when the graph runs."""
        ...


@dataclass(frozen=True)
class LocalCall:
    """One call to localize: `args`/`kwargs` are the local operands; shapes are those of the results."""

    target: Any
    args: tuple
    kwargs: Mapping[str, Any]
    global_shapes: tuple[tuple[int, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    rule: Rule | None
    ranges: Mapping[int, LocalRange]
    """Operand of indices -> this rank's range of them, where the indexed dim is split."""
    ordered: Mapping[int, LocalRange] = field(default_factory=dict)
    """Dim of the first result in which positions are counted -> this rank's range of them, where it is split."""
    at_run_time: bool = False
    """True if the start of a range is computed when the graph runs."""
    strides: tuple[tuple[int, ...], ...] = ()
    """Strides of the whole operands; only ops that address memory rather than dims need them."""

    def is_split(self, dim: int) -> bool:
        """True if a dim of the first result is split."""
        return self.local_shapes[0][dim] != self.global_shapes[0][dim]

    def local(self, size: int, dim: int) -> int:
        """A number of elements of a whole dim, as part of a local one: split as that dim of the first result is."""
        return size * self.local_shapes[0][dim] // self.global_shapes[0][dim]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def unchanged(self, insert: Insert) -> Node:
        """The same call on the local operands."""
        return insert(self.target, *self.args, **self.kwargs)


def reshape(insert: Insert, x: Node, shape: Sequence[int]) -> Node:
    """A view if the strides allow it, else a copy: decided at run time, because fake values may not have the strides
    of real ones (CPU attention) and lowering may choose others."""
    return insert(aten.reshape.default, x, list(shape))


def reshaped(call: LocalCall, insert: Insert) -> Node:
    """Reshape the first operand to the local shape. A dim that is split down to size 1 must not be squeezed."""
    return call.unchanged(insert) if call.rule is None else reshape(insert, call.args[0], call.local_shapes[0])


def packed_copy(insert: Insert, x: Node) -> Node:
    return insert(aten.clone.default, x, memory_format=torch.contiguous_format)


def column_major(insert: Insert, x: Node) -> Node:
    """The same matrices in column-major order."""
    rank = x.meta["val"].dim()
    order = [*range(rank - 2), rank - 1, rank - 2]
    return insert(aten.permute.default, packed_copy(insert, insert(aten.permute.default, x, order)), order)


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def last_dim_packed(value: torch.Tensor) -> bool:
    return value.dim() == 0 or value.shape[-1] == 1 or value.stride(-1) == 1


def last_stride_is_one(value: torch.Tensor) -> bool:
    """True even if the last dim has one element."""
    return value.dim() == 0 or value.stride(-1) == 1
