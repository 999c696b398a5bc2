"""Cost terms (`passes.cost_model.cost_terms`) of the parts of a decision: operations, groups, redistributions,
parameters.

The only source of these terms. `Sizes` gives the local size of each value: as numbers (`LocalSizes`), for the
planner's coefficients and a plan's table, or as polynomials of input and axis sizes
(`passes.sharding.search.symbolic_terms`).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from passes.cost_model.cost_terms import REDUCING, Kernel, Message, Slice, Update
from passes.cost_model.measured.measurement_key import measurement_key_of
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout, local_bytes, local_shape
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.hardware.axis import Axes
from passes.hardware.gradient_compression import sent_share
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, REPLICATE, Placement

N = TypeVar("N")
Size = TypeVar("Size", covariant=True)


class Sizes(Protocol[Size]):
    """Sizes on one device."""

    def bytes(self, parts: Iterable[tuple[Value, Layout]]) -> Size:
        """Total bytes of values."""
        ...

    def elements(self, value: Value, layout: Layout) -> Size: ...

    def flops(self, op: Operation, rows: OperationLayouts) -> Size: ...

    def outer(self, value: Value, placement: tuple[int, int]) -> Size:
        """Elements before a factor of a dim."""
        ...

    def sent_share(self, value: Value, layout: Layout, axis: int, kind: str) -> float:
        """Fraction of the bytes of a gradient in this layout that its reduction along an axis sends."""
        ...


class LocalSizes:
    """Sizes as numbers, on a mesh with these axes."""

    def __init__(self, axes: Axes):
        self.axes = axes

    def bytes(self, parts: Iterable[tuple[Value, Layout]]) -> float:
        return sum(local_bytes(value, layout, self.axes) for value, layout in parts)

    def elements(self, value: Value, layout: Layout) -> float:
        return local_bytes(value, layout, self.axes) / value.spec.itemsize

    def flops(self, op: Operation, rows: OperationLayouts) -> float:
        return op.flops * operation_share(rows, self.axes)

    def outer(self, value: Value, placement: tuple[int, int]) -> float:
        dim, factor = placement
        outer = 1
        for d in range(dim):
            outer *= value.spec.shape[d]
        for k in range(factor):
            outer *= value.factors[dim][k]
        return outer

    def sent_share(self, value: Value, layout: Layout, axis: int, kind: str) -> float:
        return sent_share(self.axes[axis].compression, kind, local_shape(value, layout, self.axes), value.spec.dtype)


def operation_share(row: OperationLayouts, axes: Axes) -> float:
    """Fraction of the whole operation's work that one device does: the one with most rows."""
    share = 1.0
    for k, axis in enumerate(axes):
        if any(isinstance(layout[k], tuple) for layout in (*row.inputs, *row.made)):
            share = share * axis.share() if axis.rows else share / axis.size
    return share


def collective(source: Placement, target: Placement) -> str | None:
    """Name of the collective between two placements on one axis, or None if there is none."""
    if source == PARTIAL:
        return {True: "reduce_scatter"}.get(isinstance(target, tuple), "all_reduce" if target == REPLICATE else None)
    if source == PARTIAL_MAX:
        return "all_reduce" if target == REPLICATE else None
    if target in (PARTIAL, PARTIAL_MAX):
        return None
    if source == REPLICATE:
        return "slice"
    return "all_gather" if target == REPLICATE else "all_to_all"


def operation_kernel(graph: PlacementGraph, op: Operation, rows: OperationLayouts, sizes: Sizes[N], key: str = "",
                     ) -> Kernel[N]:
    """Kernel of a heavy operation."""
    values = graph.values
    parts = [(values[v], p) for v, p in zip((*op.inputs, *op.outputs), rows.inputs + rows.made)]
    return Kernel(sizes.flops(op, rows), sizes.bytes(parts), values[op.outputs[0]].spec.dtype, op.kind, key)


def group_kernels(graph: PlacementGraph, operations: Sequence[Operation], layouts: Mapping[int, OperationLayouts],
                  boundary: Iterable[tuple[Value, Layout]], sizes: LocalSizes, keyed: bool = False,
                  ) -> dict[int, Kernel[float]]:
    """The kernels of a group, by the operation that stands for each: heavy ones one by one; or light ones, fused into
    one kernel that reads and writes `boundary` once, by the first. keyed: with their names."""
    if is_fused_kernel(operations):
        return {operations[0].index: fused_kernel(boundary, sizes)}
    found = {}
    for op in operations:
        if op.heavy:
            rows = layouts[op.index]
            key = measurement_key_of(graph, op, rows.inputs, rows.made, sizes.axes) if keyed else ""
            found[op.index] = operation_kernel(graph, op, rows, sizes, key)
    return found


def fused_kernel(parts: Iterable[tuple[Value, Layout]], sizes: Sizes[N]) -> Kernel[N]:
    """Light operations fused into one kernel."""
    moved = list(parts)
    return Kernel(sizes.bytes(()), sizes.bytes(moved), "float32", "pointwise")


def is_fused_kernel(operations: Sequence[Operation]) -> bool:
    """True if a group is one fused kernel; a group of views only is none."""
    return not any(op.heavy for op in operations) and any(op.kind != "view" for op in operations)


def reduction_messages(graph: PlacementGraph, op: Operation, rows: OperationLayouts, sizes: Sizes[N],
                       ) -> Iterator[tuple[int, Message[N]]]:
    """(value, message) for small partial results that are reduced where they are computed."""
    for v, made, after in zip(op.outputs, rows.made, rows.outputs):
        for axis in range(len(made)):
            if made[axis] != after[axis]:
                yield v, Message("all_reduce", axis, sizes.bytes([(graph.values[v], made)]))


def hop_term(value: Value, layout: Layout, axis: int, target: Placement, sizes: Sizes[N], bucket_bytes: float = 0.0,
              ) -> Message[N] | Slice:
    """Term of one collective of a redistribution; `passes.sharding.pricing.redistribution.after_hop` says whether it is
    legal."""
    source, kind = layout[axis], collective(layout[axis], target)
    assert kind is not None, f"no collective goes from {source} to {target}"
    if kind == "slice":
        return Slice()
    # A gather's message counts the bytes of its result: whole on this axis.
    gathered = (*layout[:axis], REPLICATE, *layout[axis + 1 :]) if kind == "all_gather" else layout
    outer = (sizes.outer(value, p) for p in (source, target) if isinstance(p, tuple))
    together = bucket_bytes if kind in REDUCING else 0.0
    share = sizes.sent_share(value, layout, axis, kind) if together else 1.0
    return Message(kind, axis, sizes.bytes([(value, gathered)]), tuple(each for each in outer if each != 1), together, share)


def update(value: Value, layout: Layout, sizes: Sizes[N]) -> Update[N]:
    """Term of the optimizer's step over a parameter."""
    return Update(sizes.elements(value, layout), value.spec.dtype)
