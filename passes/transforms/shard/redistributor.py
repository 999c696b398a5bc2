"""Emit the nodes of one redistribution step on local tensors.

A local tensor keeps the dim order of the whole one; a split factor is shorter. torch's collectives gather and scatter
along the first dim, so a split anywhere else is packed before or unpacked after: the tensor is viewed as (A, n, B) around
the split factor, and n moves to the front or back.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportReturnType=false
# pyright: reportOptionalOperand=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from passes.errors import HpmlError
from passes.graph.fx_nodes import BY_COORDINATE, COMPRESSION, GRADIENT_OF
from passes.graph.layouts import Layout, is_unequal, local_shape
from passes.graph.placement_graph import Value
from passes.graph.shard_offset import ShardOffset
from passes.hardware.axis import Axes, AxisKind, time_axis
from passes.hardware.gradient_compression import sent_share, steps_apart
from passes.json_records import FrozenMap
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, REPLICATE
from passes.op_rules.local_call import reshape
from passes.transforms.microbatch.loop_markers import ADD_UP, PUT_TOGETHER, TAKE
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.rank_coordinate import begin_of, is_small, part_from
from passes.transforms.shard.unequal_shards import UnequalParts, cut_out, exchanged

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

_MOVED_AS: dict[torch.dtype, tuple[Any, torch.dtype]] = {
    torch.bool: (torch.ops.prims.convert_element_type.default, torch.uint8),
    torch.int16: (torch.ops.prims.convert_element_type.default, torch.int32),
    **{dtype: (aten.view.dtype, torch.uint8) for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
       if (dtype := getattr(torch, f"float8_{name}", None)) is not None},
}
"""dtypes that gloo does not support: how, and as which dtype they are moved."""


@dataclass(frozen=True)
class MeshGroups:
    """This rank's place in the mesh: the axes of layouts, and on each this rank's coordinate and the name of its process group.

    On the time axis, every rank has coordinate 0, and there is no group."""

    axes: Axes
    coordinates: tuple[int, ...]
    names: tuple[str, ...]

    def with_time(self, microbatches: int) -> MeshGroups:
        return MeshGroups((*self.axes, time_axis(microbatches)), (*self.coordinates, 0), (*self.names, ""))

    def with_rows(self, axes: Axes) -> MeshGroups:
        """The same with the rows by coordinate of axes of a decision, and with what is sent along them."""
        return replace(self, axes=tuple(replace(own, rows=axis.rows, compression=axis.compression)
                                        for own, axis in zip(self.axes, axes, strict=True)))

    def local_shape(self, value: Value, layout: Layout) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return local_shape(value, layout, self.axes, self.coordinates)

    @property
    def coordinate_of(self) -> FrozenMap[str, int]:
        """This rank's coordinate, by name of the process group."""
        return FrozenMap({name: mine for name, mine in zip(self.names, self.coordinates) if name})

    @property
    def axis_of(self) -> FrozenMap[str, int]:
        """Index of the axis, by name of the process group."""
        return FrozenMap({name: axis for axis, name in enumerate(self.names)})


def local_factors(value: Value, layout: Layout, groups: MeshGroups) -> list[list[int]]:
    """Local sizes of the factors of every dim; a dim of size 1 has none."""
    rows = [list(f) for f in value.factors]
    for p, axis, mine in zip(layout, groups.axes, groups.coordinates):
        if isinstance(p, tuple):
            rows[p[0]][p[1]] = axis.part(rows[p[0]][p[1]], p in value.batch, mine)
    return rows


def around(value: Value, layout: Layout, place: tuple[int, int], groups: MeshGroups) -> tuple[int, int]:
    """(elements before, elements from) the factor at `place` in memory order of a local tensor."""
    before = after = 1
    for d, row in enumerate(local_factors(value, layout, groups)):
        for k, f in enumerate(row):
            if (d, k) < place:
                before *= f
            else:
                after *= f
    return before, after


class Redistributor:
    """Emits redistribution steps for this rank. `insert`: where nodes go. at_run_time: see
    `passes.transforms.shard.spmd_rewrite.Shard`."""

    def __init__(self, groups: MeshGroups, at_run_time: bool = False):
        self.groups, self.at_run_time, self.compression = groups, at_run_time, ("", "")

    def hop(self, insert: CallInserter, x: Node, value: Value, source: Layout, target: Layout,
            compression: tuple[str, str] = ("", ""), own: bool = False) -> Node:
        """`x` is a local tensor of `value` in layout `source`; exactly one axis differs from `target`. compression:
        of the reduction of a gradient, and the graph's input that it is of. own: along an axis of replicas, a partial sum
        becomes this rank's part, times the number of replicas."""
        self.compression = compression
        (axis,) = [a for a, (p, q) in enumerate(zip(source, target)) if p != q]
        p, q = source[axis], target[axis]
        if own and p == PARTIAL and q == REPLICATE and steps_apart(self.groups.axes[axis].compression):
            return insert(aten.mul.Tensor, x, self.groups.axes[axis].size)
        if self.groups.axes[axis].kind is AxisKind.TIME:
            return self._in_time(insert, x, value, source, target, axis)
        if p == REPLICATE:
            return self._slice(insert, x, value, source, target, axis)
        dtype = x.meta["val"].dtype
        if dtype in _MOVED_AS:
            op, moved_as = _MOVED_AS[dtype]
            if op is aten.view.dtype and not isinstance(p, tuple):
                raise HpmlError(f"values of {dtype} cannot be added up between ranks", f"node {x.name}",
                                "compute in a wider dtype")
            moved = self._move(insert, insert(op, x, moved_as), value, source, target, axis, p, q)
            return insert(op, moved, dtype)
        return self._move(insert, x, value, source, target, axis, p, q)

    def _in_time(self, insert: CallInserter, x: Node, value: Value, source: Layout, target: Layout, axis: int) -> Node:
        """Emit a marker of the microbatch loop."""
        p, q = source[axis], target[axis]
        if p == PARTIAL and q == REPLICATE:
            return insert(ADD_UP, x)
        (dim, factor), whole, begins = (q, source, True) if p == REPLICATE else (p, target, False)
        rows = local_factors(value, whole, self.groups)[dim]
        n, shape = self.groups.axes[axis].size, list(self.groups.local_shape(value, whole))
        before = math.prod(rows[:factor])
        apart = [*shape[:dim], before, n, shape[dim] // (before * n), *shape[dim + 1:]]
        if begins:
            return insert(TAKE, x, apart, dim + 1, list(self.groups.local_shape(value, target)))
        return insert(PUT_TOGETHER, x, apart, dim + 1, shape)

    def _move(self, insert, x, value, source, target, axis, p, q) -> Node:
        if isinstance(p, tuple):
            return (self._all_gather if q == REPLICATE else self._all_to_all)(insert, x, value, source, target, axis)
        if q == REPLICATE:
            kind = "max" if p == PARTIAL_MAX else "sum"
            return self._reduced(insert, axis, c10d.all_reduce.default, self._packed(insert, x), kind, self.groups.names[axis])
        return self._reduce_scatter(insert, x, value, source, target, axis)

    def _wait(self, insert: CallInserter, target, *args) -> Node:
        return insert(c10d.wait_tensor.default, insert(target, *args))

    def _reduced(self, insert: CallInserter, axis: int, target, *args) -> Node:
        wait = self._wait(insert, target, *args)
        (compression, owner), value = self.compression, args[0].meta["val"]
        kind, dtype = target.__name__.split(".")[0].removesuffix("_tensor"), str(value.dtype).removeprefix("torch.")
        if sent_share(compression, kind, value.shape, dtype) < 1.0:
            wait.args[0].meta.update({COMPRESSION: (compression, self.groups.axes[axis].size), GRADIENT_OF: owner})
        return wait

    def _packed(self, insert: CallInserter, x: Node) -> Node:
        if x.meta["val"].is_contiguous():
            return x
        return insert(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _shaped(self, insert: CallInserter, x: Node, shape: Sequence[int]) -> Node:
        return x if list(x.meta["val"].shape) == list(shape) else reshape(insert, x, shape)

    def _slice(self, insert: CallInserter, x: Node, value: Value, source: Layout, target: Layout, axis: int) -> Node:
        n, mine = self.groups.axes[axis].size, self.groups.coordinates[axis]
        dim, factor = target[axis]
        rows = local_factors(value, source, self.groups)
        outer = 1
        for f in rows[dim][:factor]:
            outer *= f
        local = self.groups.local_shape(value, target)
        if is_unequal(value, target[axis], self.groups.axes[axis]):
            return self._cut(insert, x, value, source, target, axis, outer)
        apart = x
        if outer > 1:
            shape = list(x.meta["val"].shape)
            inner = shape[dim] // (outer * n)
            apart = reshape(insert, x, [*shape[:dim], outer, n, inner, *shape[dim + 1 :]])
        begins = ShardOffset(local[dim] if outer == 1 else 1, ((self.groups.names[axis], 1),))
        # A slice of a graph input may be hoisted out of the graph (`passes.transforms.shard.hoist_batch_slice`).
        if self.at_run_time and x.op != "placeholder" and is_small(x, n):
            begin = begin_of(insert, begins, x.meta["val"].device)
            part = part_from(insert, apart, dim if outer == 1 else dim + 1, begin, begins.count)
        elif outer == 1:
            part = insert(aten.slice.Tensor, x, dim, mine * local[dim], (mine + 1) * local[dim])
            part.meta[BY_COORDINATE] = begins
        else:
            part = insert(aten.select.int, apart, dim + 1, mine)
            part.meta[BY_COORDINATE] = begins
        return part if outer == 1 else reshape(insert, part, local)

    def _cut(self, insert, x, value, source, target, axis, outer) -> Node:
        """A slice of another size than those of other ranks."""
        parts, local = self._parts(value, source, target[axis], axis), self.groups.local_shape(value, target)
        (dim, _), size = target[axis], sum(parts.sizes)
        begin, own = parts.starts[parts.own], parts.sizes[parts.own]
        part = cut_out(insert, x, dim, (outer, size, x.meta["val"].shape[dim] // (outer * size)), begin, begin + own)
        part.meta[BY_COORDINATE] = ShardOffset(own, (), begin)
        return self._shaped(insert, part, local)

    def _parts(self, value: Value, layout: Layout, place: tuple[int, int], axis: int) -> UnequalParts:
        """The parts of a factor along an axis. layout: of the local tensor around it."""
        whole = (*layout[:axis], REPLICATE, *layout[axis + 1:])
        size = local_factors(value, whole, self.groups)[place[0]][place[1]]
        before, _ = around(value, layout, place, self.groups)
        return UnequalParts(before, self.groups.axes[axis].parts(size, place in value.batch), self.groups.coordinates[axis])

    def _to_front(self, insert: CallInserter, x: Node, before: int, n: int) -> Node:
        """(before, n, rest) -> (n, before, rest), packed."""
        total = x.meta["val"].numel()
        x = reshape(insert, x, [before, n, total // (before * n)])
        return self._packed(insert, insert(aten.permute.default, x, [1, 0, 2]) if before > 1 else
                            reshape(insert, x, [n, 1, total // n]))

    def _from_front(self, insert: CallInserter, x: Node, before: int, n: int, shape: Sequence[int]) -> Node:
        """(n, before, rest) in one block -> (before, n, rest), in `shape`."""
        total = x.meta["val"].numel()
        if before > 1:
            x = reshape(insert, x, [n, before, total // (before * n)])
            x = insert(aten.permute.default, x, [1, 0, 2])
        return self._shaped(insert, x, shape)

    def _all_gather(self, insert, x, value, source, target, axis) -> Node:
        n, name = self.groups.axes[axis].size, self.groups.names[axis]
        if is_unequal(value, source[axis], self.groups.axes[axis]):
            whole = self._parts(value, source, source[axis], axis).gathered(insert, x, name)
            return self._shaped(insert, whole, self.groups.local_shape(value, target))
        before, _ = around(value, source, source[axis], self.groups)
        gathered = self._wait(insert, c10d.all_gather_into_tensor.default, self._packed(insert, x), n, name)
        return self._from_front(insert, gathered, before, n, self.groups.local_shape(value, target))

    def _reduce_scatter(self, insert, x, value, source, target, axis) -> Node:
        n, name = self.groups.axes[axis].size, self.groups.names[axis]
        if is_unequal(value, target[axis], self.groups.axes[axis]):
            part = self._parts(value, source, target[axis], axis).scattered(insert, x, name)
            return self._shaped(insert, part, self.groups.local_shape(value, target))
        before, _ = around(value, source, target[axis], self.groups)
        front = self._to_front(insert, x, before, n)
        part = self._reduced(insert, axis, c10d.reduce_scatter_tensor.default, front, "sum", n, name)
        return self._shaped(insert, part, self.groups.local_shape(value, target))

    def _all_to_all(self, insert, x, value, source, target, axis) -> Node:
        n, name = self.groups.axes[axis].size, self.groups.names[axis]
        if any(is_unequal(value, p, self.groups.axes[axis]) for p in (source[axis], target[axis])):
            parts = self._parts(value, target, source[axis], axis), self._parts(value, source, target[axis], axis)
            return self._shaped(insert, exchanged(insert, x, *parts, name), self.groups.local_shape(value, target))
        before, _ = around(value, source, target[axis], self.groups)
        front = self._to_front(insert, x, before, n)
        rows = [1] * n
        received = self._wait(insert, c10d.all_to_all_single.default, front, rows, rows, name)
        # Block r holds rank r's shard of the source factor, already sliced in the target factor.
        both = list(source)
        both[axis] = REPLICATE
        cut = local_factors(value, tuple(both), self.groups)
        for (dim, factor) in (source[axis], target[axis]):
            cut[dim][factor] //= n
        inside = 1
        for d, row in enumerate(cut):
            for k, f in enumerate(row):
                if (d, k) < source[axis]:
                    inside *= f
        return self._from_front(insert, received, inside, n, self.groups.local_shape(value, target))
