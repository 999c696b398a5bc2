"""The oracle: recompute the cost and the bytes of a decision on the unfolded graph.

Visits the layouts that the rewrite will apply, operation by operation and collective by collective, with the prices of single
kernels and collectives and its own formulas and attribution rule (`passes.sharding.oracle.comm_attribution`). It knows nothing
of classes, multiplicities, choices, entities, edges or the solver: agreement with the solver's objective shows that folding,
building and decoding are sound. Checked on every solve.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.cost_model.cost_terms import SLICE, Prices, copy
from passes.cost_model.measured.measurement_key import measurement_key_of
from passes.graph.decision import Decision, Route, RouteSegment
from passes.graph.layouts import Layout, local_bytes, local_shape
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.gradient_compression import sent_share
from passes.op_rules.base import Placement
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.oracle.comm_attribution import CommAttribution, arrivals
from passes.sharding.pricing.redistribution import bucket_bytes_of
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.solver.verification import VerificationError


@dataclass(frozen=True)
class DecisionCost:
    """Cost of a step by part, in the unit of the prices, and bytes in memory."""

    compute: float
    communication: float
    optimizer: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float

    @property
    def step(self) -> float:
        return self.compute + self.communication + self.optimizer

    @property
    def held_bytes(self) -> float:
        """Bytes if everything were in memory at once."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def boundary(graph: PlacementGraph, c: OpGroup, decision: Decision, read: Mapping[int, Route] | None = None,
             ) -> list[tuple[int, Layout]]:
    """Boundary of a group: its inputs, in the layouts in which they arrive, and its outputs. read: its `arrivals`."""
    read = arrivals(graph, c, decision) if read is None else read
    made = {v: layout for i in c.operations for v, layout in zip(graph.operations[i].outputs, decision.operations[i].outputs)}
    return [*((v, read[v].target) for v in c.inputs), *((v, made[v]) for v in c.outputs)]


class _CostRecomputation:
    def __init__(self, found: CommAttribution, prices: Prices, bucket_bytes: float):
        self.graph, self.decision, self.prices, self.axes = found.graph, found.decision, prices, found.decision.axes
        self.found, self.bucket_bytes = found, bucket_bytes

    def local(self, v: int, layout: Layout) -> float:
        return local_bytes(self.graph.values[v], layout, self.axes)

    def share(self, layouts: Sequence[Layout]) -> float:
        share = 1.0
        for k, axis in enumerate(self.axes):
            if any(not isinstance(p[k], str) for p in layouts):
                share = share * axis.share() if axis.rows else share / axis.size
        return share

    def operation(self, index: int) -> float:
        """Cost of a heavy operation on its local operands."""
        op, rows = self.graph.operations[index], self.decision.operations[index]
        moved = sum(self.local(v, p) for v, p in zip((*op.inputs, *op.outputs), rows.inputs + rows.made))
        flops = op.flops * self.share(rows.inputs + rows.made)
        key = measurement_key_of(self.graph, op, rows.inputs, rows.made, self.axes) if self.prices.keyed else ""
        return self.prices.kernel(flops, moved, self.graph.values[op.outputs[0]].spec.dtype, op.kind, key)

    def group(self, c: OpGroup) -> float:
        """Cost of a group: heavy operations one by one, or light ones as one kernel that reads and writes the boundary."""
        operations = [self.graph.operations[i] for i in c.operations]
        heavy = [op.index for op in operations if op.heavy]
        if heavy or all(op.kind == "view" for op in operations):
            return sum(map(self.operation, heavy))
        moved = sum(self.local(v, p) for v, p in boundary(self.graph, c, self.decision, self.found.arrived[c.index]))
        return self.prices.kernel(0.0, moved, "float32", "pointwise")

    def reductions(self, index: int) -> float:
        op, rows = self.graph.operations[index], self.decision.operations[index]
        if rows.made == rows.outputs:
            return 0.0
        return sum(
            self.prices.collective("all_reduce", axis, self.local(v, made))
            for v, made, after in zip(op.outputs, rows.made, rows.outputs)
            for axis in range(len(self.axes)) if made[axis] != after[axis]
        )

    def leg(self, leg: RouteSegment) -> float:
        route = leg.route
        return sum(self.hop(route.value, route.layout(k), route.layout(k + 1), leg.gradient)
                   for k in range(leg.start, leg.stop))

    def hop(self, v: int, layout: Layout, after: Layout, gradient: bool) -> float:
        """Cost of one collective on one axis; small reductions of gradients share a bucket."""
        value, prices = self.graph.values[v], self.prices
        [(axis, p, q)] = [(a, p, q) for a, (p, q) in enumerate(zip(layout, after)) if p != q]
        kind = _COLLECTIVES.get((_letter(p), _letter(q)))
        nested = any(other in (p, q) and not isinstance(other, str) for other in layout[axis + 1:])
        if kind is None or nested or not self.divides(v, after):
            raise VerificationError(f"{value.name} takes an illegal hop from {layout} to {after}")
        if kind == "slice":
            return SLICE
        moved = self.local(v, after if kind == "all_gather" else layout)
        if kind in ("all_reduce", "reduce_scatter") and gradient:
            share = sent_share(self.axes[axis].compression, kind, local_shape(value, layout, self.axes), value.spec.dtype)
            moved, together = moved * share, self.bucket_bytes * share
            if moved < together:
                return (prices.collective(kind, axis, together) + 2 * copy(together, prices)) * moved / together
        # Shards that are not contiguous are packed before the collective, or unpacked after it.
        copies = sum(not self.in_one_block(v, *each) for each in (p, q) if not isinstance(each, str))
        return prices.collective(kind, axis, moved) + copies * copy(moved, prices)

    def divides(self, v: int, layout: Layout) -> bool:
        if any(axis.rows for axis in self.axes):
            return self.divides_rows(v, layout)
        factors = self.graph.values[v].factors
        return all(factors[p[0]][p[1]] % math.prod(axis.size for other, axis in zip(layout, self.axes) if other == p) == 0
                   for p in layout if not isinstance(p, str))

    def divides_rows(self, v: int, layout: Layout) -> bool:
        """The same where an axis has unequal rows: each rank's part of a factor must be a whole number."""
        value = self.graph.values[v]
        for place in {p for p in layout if not isinstance(p, str)}:
            over = [axis for p, axis in zip(layout, self.axes) if p == place]
            rows = [axis.rows if axis.rows and place in value.batch else (1,) * axis.size for axis in over]
            size, whole = value.factors[place[0]][place[1]], math.prod(map(sum, rows))
            if any(size * math.prod(each) % whole for each in itertools.product(*rows)):
                return False
        return True

    def in_one_block(self, v: int, dim: int, factor: int) -> bool:
        value = self.graph.values[v]
        return math.prod(value.spec.shape[:dim]) * math.prod(value.factors[dim][:factor]) == 1


_COLLECTIVES = {
    ("P", "S"): "reduce_scatter", ("P", "R"): "all_reduce", ("M", "R"): "all_reduce",
    ("R", "S"): "slice", ("S", "R"): "all_gather", ("S", "S"): "all_to_all",
}


def _letter(placement: Placement) -> str:
    return placement if isinstance(placement, str) else "S"


def recompute_cost(
    graph: PlacementGraph, groups: Sequence[OpGroup], saved: frozenset[int], decision: Decision, prices: Prices,
    state: TrainingStateModel, bucket_bytes: float | None = None, found: CommAttribution | None = None,
) -> DecisionCost:
    """Recompute the cost of a decision. `bucket_bytes`: size of a gradient bucket (None: the graph's). `found`: the attribution
    of its collectives, if that is known from other prices.

    Raises VerificationError where layouts and routes are inconsistent.
    """
    found = found or CommAttribution(graph, groups, saved, decision)
    walk = _CostRecomputation(found, prices, bucket_bytes_of(graph) if bucket_bytes is None else bucket_bytes)
    compute = sum(map(walk.group, groups))
    communication = sum(walk.reductions(i) for group in groups for i in group.operations)
    communication += sum(map(walk.leg, found.legs))
    activations = sum(walk.local(v, layout) for v, layout in found.saved.items())
    parameters = gradients = optimizer_bytes = optimizer = 0.0
    trained = graph.gradients
    for v, layout in decision.inputs.items():
        value = graph.values[v]
        if value.kind != "parameter":
            continue
        held = walk.local(v, decision.stored(v))
        parameters += held + (walk.local(v, layout) if v in decision.held else 0.0)
        if v in trained:
            gradients += held * state.gradient
            optimizer_bytes += held * state.optimizer
            optimizer += prices.update(held / value.spec.itemsize, value.spec.dtype)
    return DecisionCost(compute, communication, optimizer, parameters, gradients, optimizer_bytes, activations)
