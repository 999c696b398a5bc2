"""Cost terms of a decision with symbolic sizes: kernels, messages, updates of parameters, bytes in memory.

The same traversal as `cost_check`, with the sizes of inputs and of mesh axes left open. A `Quantity` is
a sum of products of powers of input sizes, each divided by the axes that split it. Equal terms are counted,
not repeated, so their number does not grow with depth.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from passes.cost_model.cost_terms import Kernel, Prices, Term, price
from passes.cost_model.formulas.polynomial_terms import Polynomial, Powers
from passes.cost_model.measured.measurement_key import measurement_key_of
from passes.graph.decision import OperationLayouts
from passes.graph.layouts import Layout, parse_layout
from passes.graph.placement_graph import Operation, Value
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.oracle.cost_check import boundary
from passes.sharding.pricing.decision_terms import (
    LocalSizes,
    fused_kernel,
    hop_term,
    is_fused_kernel,
    operation_kernel,
    reduction_messages,
    update,
)
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.search.mesh_placement import MeshPlacement

AxisNumbers = tuple[int, ...]
"""Mesh axes that divide a size, ascending."""
Quantity = tuple[tuple[tuple[AxisNumbers, Powers], Fraction], ...]
"""Coefficients of the products of powers of input sizes, over the product of axes."""
PARTS = ("compute", "communication", "optimizer")
HELD = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class CountedTerm:
    """`count` terms a step, in part `part` (one of `PARTS`), caused by entity number `entity` of the problem."""

    entity: int
    part: str
    term: Term[Quantity]
    count: float


@dataclass(frozen=True)
class ByteTerm:
    """Bytes in memory throughout the step: `count` times the quantity. part: one of `HELD`."""

    entity: int
    part: str
    bytes: Quantity
    count: float


@dataclass(frozen=True)
class DivisibilityLimit:
    """The size `factor` must be divisible by the product of `axes`: it is a factor of a dim of the value `name`."""

    factor: Polynomial
    axes: AxisNumbers
    name: str


@dataclass(frozen=True)
class SymbolicTerms:
    """All terms of a step. transients: for each call, the bytes of operands and results that are not held."""

    charges: tuple[CountedTerm, ...]
    held: tuple[ByteTerm, ...]
    transients: tuple[Quantity, ...]
    limits: tuple[DivisibilityLimit, ...]


class Polynomials(Protocol):
    """Sizes of a graph as polynomials; implemented by `passes.cost_model.formulas.symbolic_sizes`."""

    def bytes(self, v: int) -> Polynomial: ...

    def flops(self, operation: int) -> Polynomial: ...

    def factor(self, v: int, dim: int, factor: int) -> Polynomial: ...

    def outer(self, v: int, placement: tuple[int, int]) -> Polynomial: ...


class _Quantities:
    """`passes.sharding.pricing.decision_terms.Sizes` as quantities. limits: divisibility constraints collected on the way."""

    def __init__(self, polynomials: Polynomials):
        self.polynomials = polynomials
        self.limits: dict[tuple, DivisibilityLimit] = {}

    def bytes(self, parts: Iterable[tuple[Value, Layout]]) -> Quantity:
        sizes = []
        for value, layout in parts:
            for p in {p for p in layout if isinstance(p, tuple)}:
                key = self.polynomials.factor(value.index, *p), tuple(a for a, other in enumerate(layout) if other == p)
                self.limits.setdefault(key, DivisibilityLimit(*key, value.name))
            axes = tuple(a for a, p in enumerate(layout) if isinstance(p, tuple))
            sizes.append((axes, self.polynomials.bytes(value.index)))
        return _total(sizes)

    def elements(self, value: Value, layout: Layout) -> Quantity:
        return tuple((key, factor / value.spec.itemsize) for key, factor in self.bytes([(value, layout)]))

    def flops(self, op: Operation, rows: OperationLayouts) -> Quantity:
        layouts = rows.inputs + rows.made
        axes = tuple(a for a in range(len(layouts[0])) if any(isinstance(p[a], tuple) for p in layouts))
        return _total([(axes, self.polynomials.flops(op.index))])

    def outer(self, value: Value, placement: tuple[int, int]) -> Quantity:
        return whole(self.polynomials.outer(value.index, placement))

    def sent_share(self, value: Value, layout: Layout, axis: int, kind: str) -> float:
        return 1.0  # formulas leave compression out


def collect_terms(placed: MeshPlacement, polynomials: Polynomials, state: TrainingStateModel, prices: Prices) -> SymbolicTerms:
    """Terms of an answer; `prices`: those that it was found with."""
    walk = _TermCollector(placed, _Quantities(polynomials), prices)
    for c in placed.problem.groups:
        walk.group(c)
    walk.edges()
    walk.parameters(state)
    return SymbolicTerms(
        tuple(CountedTerm(entity, part, term, float(count)) for (entity, part, term), count in walk.charges.items()),
        tuple(ByteTerm(entity, part, size, float(count)) for (entity, part, size), count in walk.held.items()),
        tuple(walk.transients), tuple(walk.sizes.limits.values()),
    )


class _TermCollector:
    def __init__(self, placed: MeshPlacement, sizes: _Quantities, prices: Prices):
        self.placed, self.sizes, self.prices, self.problem = placed, sizes, prices, placed.problem
        self.graph, self.decision = placed.problem.graph, placed.decision
        self.charges: dict[tuple[int, str, Term[Quantity]], Fraction] = defaultdict(Fraction)
        self.held: dict[tuple[int, str, Quantity], Fraction] = defaultdict(Fraction)
        self.transients: dict[Quantity, None] = {}

    def kernel(self, op: Operation) -> Kernel[Quantity]:
        """A heavy operation; where it was measured, its factor is measured cost over modeled cost."""
        rows, axes = self.decision.operations[op.index], self.decision.axes
        key = measurement_key_of(self.graph, op, rows.inputs, rows.made, axes) if self.prices.keyed else ""
        keyed = operation_kernel(self.graph, op, rows, LocalSizes(axes), key)
        modeled = price(replace(keyed, key=""), self.prices)
        factor = price(keyed, self.prices) / modeled if modeled else 1.0
        return replace(operation_kernel(self.graph, op, rows, self.sizes), factor=factor)

    def weight(self, entity: int) -> Fraction:
        """Instances in the whole model per instance in the graph."""
        return Fraction(self.placed.solved.entities[entity].multiplicity,
                        self.problem.problem.entities[entity].multiplicity)

    def group(self, c: OpGroup) -> None:
        entity, values = self.problem.entities.of_group[c.index], self.graph.values
        weight, operations = self.weight(entity), [self.graph.operations[i] for i in c.operations]
        for op in operations:
            rows = self.decision.operations[op.index]
            if op.heavy:
                self.charges[entity, "compute", self.kernel(op)] += weight
            for _, message in reduction_messages(self.graph, op, rows, self.sizes):
                self.charges[entity, "communication", message] += weight
            pairs = [*zip(op.inputs, rows.inputs), *zip(op.outputs, rows.made)]
            self.transients[self.sizes.bytes((values[v], p) for v, p in pairs if v not in self.problem.saved)] = None
        if is_fused_kernel(operations):
            moved = [(values[v], p) for v, p in boundary(self.graph, c, self.decision)]
            self.charges[entity, "compute", fused_kernel(moved, self.sizes)] += weight
        for position, port in self.problem.held_inside[c.index]:
            op = operations[position]
            layout = self.decision.operations[op.index].outputs[port]
            self.held[entity, "activations", self.sizes.bytes([(values[op.outputs[port]], layout)])] += weight

    def edges(self) -> None:
        """Redistributions, and saved copies."""
        by_name = {value.name: value for value in self.graph.values}
        bucket = self.problem.bucket_bytes
        kept: set[int] = set()
        for edge, path in zip(self.placed.solved.edges, self.placed.solution.paths, strict=True):
            value, target = by_name[edge.name], self.placed.solved.entities[edge.target]
            if target.kind == "kept" and value.index in self.problem.saved and edge.target not in kept:
                kept.add(edge.target)
                label = target.choices[self.placed.solution.chosen[edge.target]].inputs[0]
                quantity = self.sizes.bytes([(value, parse_layout(label))]) if label is not None else ()
                self.held[edge.target, "activations", quantity] += target.multiplicity
            for arc in path:
                layout, after = parse_layout(arc.source), parse_layout(arc.target)
                [axis] = [a for a in range(len(layout)) if layout[a] != after[a]]
                term = hop_term(value, layout, axis, after[axis], self.sizes, bucket if target.kind == "parameter" else 0.0)
                self.charges[edge.target, "communication", term] += edge.multiplicity
                self.sizes.bytes([(value, after)])  # records divisibility constraints

    def parameters(self, state: TrainingStateModel) -> None:
        trained = self.graph.gradients
        for v, layout in self.decision.inputs.items():
            value = self.graph.values[v]
            if value.kind != "parameter":
                continue
            stored = self.decision.stored(v)
            entity, held = self.problem.entities.of_input[v], self.sizes.bytes([(value, stored)])
            weight = self.weight(entity)
            self.held[entity, "parameters", held] += weight
            if v in self.decision.held:
                self.held[entity, "parameters", self.sizes.bytes([(value, layout)])] += weight
                if v in trained:
                    self.gathered(entity, value, weight)
            if v in trained:
                self.held[entity, "gradients", held] += weight * Fraction(state.gradient)
                self.held[entity, "optimizer", held] += weight * Fraction(state.optimizer)
                self.charges[entity, "optimizer", update(value, stored, self.sizes)] += weight

    def gathered(self, entity: int, value: Value, count: Fraction) -> None:
        """Parameters that the runtime gathers once a step, and holds unsharded."""
        route = self.decision.held[value.index]
        for k in range(len(route.hops)):
            layout, after = route.layout(k), route.layout(k + 1)
            [axis] = [a for a in range(len(layout)) if layout[a] != after[a]]
            self.charges[entity, "communication", hop_term(value, layout, axis, after[axis], self.sizes)] += count


def _total(parts: Iterable[tuple[AxisNumbers, Polynomial]]) -> Quantity:
    sums: dict[tuple[AxisNumbers, Powers], Fraction] = {}
    for axes, size in parts:
        for powers, factor in size:
            sums[axes, powers] = sums.get((axes, powers), Fraction(0)) + factor
    return tuple(sorted(sums.items()))


def whole(size: Polynomial) -> Quantity:
    """A size that no axis divides."""
    return _total([((), size)])
