"""What a decision costs, as terms over sizes: kernels, messages, updates of parameters, bytes that are held.

The same walk as `reprice`, with two things left open: the sizes of the inputs and those of the mesh axes. A `Quantity` is
a sum of products of powers of the former, each divided by the axes that split it. Terms that are equal are counted,
not repeated, so their number does not grow with depth.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from passes.graph.layouts import Layout, local_bytes, parse_layout
from passes.graph.placement_graph import Operation
from passes.graph.polynomial import Polynomial, Powers
from passes.partition.choices import Prices, operation_share
from passes.partition.groups import Group
from passes.partition.place import Placed
from passes.partition.redistribution import bucket_bytes_of, collective
from passes.partition.reprice import boundary
from passes.partition.state import StateModel
from passes.rules.base import Placement

Axes = tuple[int, ...]
"""Numbers of the mesh axes that divide a size, ascending."""
Quantity = tuple[tuple[tuple[Axes, Powers], Fraction], ...]
"""Coefficients of the products of powers of input sizes, over the product of axes."""
PARTS = ("compute", "communication", "optimizer")
HELD = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Kernel:
    """One kernel, as `CostModel.compute_us` prices it. kind: of an operation. factor: what its time is over that price,
    where it was measured."""

    flops: Quantity
    bytes: Quantity
    dtype: str
    kind: str
    factor: float = 1.0


@dataclass(frozen=True)
class Message:
    """One collective over a mesh axis. Its bytes are packed or unpacked by a copy for each entry of `outer` (the number
    of elements before the dim that is split) that is not 1. bucket_bytes: fewer bytes than that are their part of a
    collective of that many, plus a copy into and out of it; 0 where nothing is reduced together."""

    collective: str
    axis: int
    bytes: Quantity
    outer: tuple[Polynomial, ...] = ()
    bucket_bytes: float = 0.0


@dataclass(frozen=True)
class Slice:
    """A local step of a redistribution."""


@dataclass(frozen=True)
class Update:
    """The optimizer's step over so many elements."""

    elements: Quantity
    dtype: str


Term = Kernel | Message | Slice | Update


@dataclass(frozen=True)
class Charge:
    """`count` terms a step, of part `part` of it (one of `PARTS`), that entity number `entity` of the problem causes."""

    entity: int
    part: str
    term: Term
    count: float


@dataclass(frozen=True)
class Held:
    """Bytes held through the step: `count` times the quantity. part: one of `HELD`."""

    entity: int
    part: str
    bytes: Quantity
    count: float


@dataclass(frozen=True)
class Limit:
    """The size `factor` must divide by the product of `axes`: it is a factor of a dim of the value `name`."""

    factor: Polynomial
    axes: Axes
    name: str


@dataclass(frozen=True)
class Bill:
    """All terms of a step. transients: of each call, the bytes of operands and results that are not held."""

    charges: tuple[Charge, ...]
    held: tuple[Held, ...]
    transients: tuple[Quantity, ...]
    limits: tuple[Limit, ...]


class Sizes(Protocol):
    """Sizes of a graph as polynomials; `passes.analysis.symbolic_sizes` has them."""

    def bytes(self, v: int) -> Polynomial: ...

    def flops(self, operation: int) -> Polynomial: ...

    def factor(self, v: int, dim: int, factor: int) -> Polynomial: ...

    def outer(self, v: int, placement: tuple[int, int]) -> Polynomial: ...


def bill(placed: Placed, sizes: Sizes, state: StateModel, prices: Prices) -> Bill:
    """Terms of an answer; `prices`: those that it was found with."""
    walk = _Walk(placed, sizes, prices)
    for c in placed.problem.groups:
        walk.group(c)
    walk.edges()
    walk.parameters(state)
    return Bill(
        tuple(Charge(entity, part, term, float(count)) for (entity, part, term), count in walk.charges.items()),
        tuple(Held(entity, part, size, float(count)) for (entity, part, size), count in walk.held.items()),
        tuple(walk.transients), tuple(walk.limits.values()),
    )


class _Walk:
    def __init__(self, placed: Placed, sizes: Sizes, prices: Prices):
        self.placed, self.sizes, self.prices, self.problem = placed, sizes, prices, placed.problem
        self.graph, self.decision = placed.problem.graph, placed.decision
        self.charges: dict[tuple[int, str, Term], Fraction] = defaultdict(Fraction)
        self.held: dict[tuple[int, str, Quantity], Fraction] = defaultdict(Fraction)
        self.transients: dict[Quantity, None] = {}
        self.limits: dict[tuple, Limit] = {}

    def local(self, pairs: Iterable[tuple[int, Layout]]) -> Quantity:
        """Bytes of values on one device; what has to divide for that is noted."""
        parts = []
        for v, layout in pairs:
            for p in {p for p in layout if isinstance(p, tuple)}:
                key = self.sizes.factor(v, *p), tuple(a for a, other in enumerate(layout) if other == p)
                self.limits.setdefault(key, Limit(*key, self.graph.values[v].name))
            parts.append((tuple(a for a, p in enumerate(layout) if isinstance(p, tuple)), self.sizes.bytes(v)))
        return _total(parts)

    def kernel(self, op: Operation) -> Kernel:
        """A heavy operation."""
        rows, graph, sizes = self.decision.operations[op.index], self.graph, self.decision.sizes
        pairs, layouts = [*zip(op.inputs, rows.inputs), *zip(op.outputs, rows.made)], rows.inputs + rows.made
        axes = tuple(a for a in range(len(sizes)) if any(isinstance(p[a], tuple) for p in layouts))
        dtype = graph.values[op.outputs[0]].spec.dtype
        flops = op.flops * operation_share(rows, sizes)
        nbytes = sum(local_bytes(graph.values[v], p, sizes) for v, p in pairs)
        modeled = self.prices.compute_us(flops, nbytes, dtype, op.kind)
        now = self.prices.operation_us(graph, op, rows.inputs, rows.made, sizes, flops, nbytes)
        return Kernel(_total([(axes, self.sizes.flops(op.index))]), self.local(pairs), dtype, op.kind,
                      now / modeled if modeled else 1.0)

    def weight(self, entity: int) -> Fraction:
        """Instances in the whole model of each one in the graph."""
        return Fraction(self.placed.solved.entities[entity].multiplicity,
                        self.problem.problem.entities[entity].multiplicity)

    def group(self, c: Group) -> None:
        entity = self.problem.entities.of_group[c.index]
        weight, operations = self.weight(entity), [self.graph.operations[i] for i in c.operations]
        for op in operations:
            rows = self.decision.operations[op.index]
            pairs = [*zip(op.inputs, rows.inputs), *zip(op.outputs, rows.made)]
            if op.heavy:
                self.charges[entity, "compute", self.kernel(op)] += weight
            for v, before, after in zip(op.outputs, rows.made, rows.outputs):
                for axis in range(len(before)):
                    if before[axis] != after[axis]:
                        message = Message("all_reduce", axis, self.local([(v, before)]))
                        self.charges[entity, "communication", message] += weight
            self.transients[self.local((v, layout) for v, layout in pairs if v not in self.problem.saved)] = None
        if not any(op.heavy for op in operations) and any(op.kind != "view" for op in operations):
            moved = self.local(boundary(self.graph, c, self.decision))
            self.charges[entity, "compute", Kernel((), moved, "float32", "pointwise")] += weight
        for position, port in self.problem.held_inside[c.index]:
            op = operations[position]
            layout = self.decision.operations[op.index].outputs[port]
            self.held[entity, "activations", self.local([(op.outputs[port], layout)])] += weight

    def edges(self) -> None:
        """What is redistributed, and what is saved for backward in a copy of its own."""
        by_name = {value.name: value.index for value in self.graph.values}
        bucket = bucket_bytes_of(self.graph)
        kept: set[int] = set()
        for edge, path in zip(self.placed.solved.edges, self.placed.solution.paths, strict=True):
            v, target = by_name[edge.name], self.placed.solved.entities[edge.target]
            if target.kind == "kept" and v in self.problem.saved and edge.target not in kept:
                kept.add(edge.target)
                label = target.choices[self.placed.solution.chosen[edge.target]].inputs[0]
                quantity = self.local([(v, parse_layout(label))]) if label is not None else ()
                self.held[edge.target, "activations", quantity] += target.multiplicity
            for arc in path:
                layout, after = parse_layout(arc.source), parse_layout(arc.target)
                [axis] = [a for a in range(len(layout)) if layout[a] != after[a]]
                term = self._step(v, layout, axis, after[axis], bucket if target.kind == "parameter" else 0.0)
                self.charges[edge.target, "communication", term] += edge.multiplicity
                self.local([(v, after)])

    def _step(self, v: int, layout: Layout, axis: int, target: Placement, bucket_bytes: float) -> Term:
        """See `passes.partition.redistribution.change`, which prices it."""
        source, kind = layout[axis], collective(layout[axis], target)
        if kind == "slice":
            return Slice()
        assert kind is not None, "paths consist of legal steps"
        # What a gather makes is what its devices hold together: whole on this axis.
        gathered = (*layout[:axis], "R", *layout[axis + 1:]) if kind == "all_gather" else layout
        outer = tuple(self.sizes.outer(v, p) for p in (source, target) if isinstance(p, tuple))
        return Message(kind, axis, self.local([(v, gathered)]), tuple(each for each in outer if not _is_one(each)),
                       bucket_bytes if kind in ("all_reduce", "reduce_scatter") else 0.0)

    def parameters(self, state: StateModel) -> None:
        trained = {p for _, p in self.graph.outputs if p is not None}
        for v, layout in self.decision.inputs.items():
            value = self.graph.values[v]
            if value.kind != "parameter":
                continue
            entity, held = self.problem.entities.of_input[v], self.local([(v, layout)])
            weight = self.weight(entity)
            self.held[entity, "parameters", held] += weight
            if v in trained:
                self.held[entity, "gradients", held] += weight * Fraction(state.gradient)
                self.held[entity, "optimizer", held] += weight * Fraction(state.optimizer)
                elements = tuple((key, factor / value.spec.itemsize) for key, factor in held)
                self.charges[entity, "optimizer", Update(elements, value.spec.dtype)] += weight


def _total(parts: Iterable[tuple[Axes, Polynomial]]) -> Quantity:
    sums: dict[tuple[Axes, Powers], Fraction] = {}
    for axes, size in parts:
        for powers, factor in size:
            sums[axes, powers] = sums.get((axes, powers), Fraction(0)) + factor
    return tuple(sorted(sums.items()))


def whole(size: Polynomial) -> Quantity:
    """A size that no axis divides."""
    return _total([((), size)])


def _is_one(size: Polynomial) -> bool:
    return len(size) == 1 and not any(size[0][0]) and size[0][1] == 1
