"""Attribute the collectives of a decision to readers, from layouts and routes alone: the rule of the oracle.

A *reader* of a value is a group of operations that does not compute it, or a graph output. A reader runs in forward
or in backward; an output runs where its value is computed; tangents belong to backward.

- A value with several readers in one phase is redistributed to a copy in one layout, which is paid once; each reader pays
  its own collectives from there, even where two are equal.
- The same holds for a value that forward computes (or gathers from a batch sharded by rows) and backward reads: that copy is
  saved, and backward starts from it. Parameters and replicated inputs are in memory in backward anyway: it starts from them.
- A single reader pays its collectives from the layout in which the value is computed, stored, or saved.
- Inside a group nothing is paid: operations may only slice results of others in the group and values the group has read.
- Collectives of a gradient on its way to the optimizer come last: reductions there share a bucket with others.
- A parameter that the runtime gathers and holds unsharded is gathered once a step if it is trained; else once, at no cost.

The rewrite (`passes.transforms.shard.spmd_rewrite`) emits each collective of a value once for all routes with the same prefix.
This module counts the same, except where two readers take equal collectives from their copy: the rewrite shares those.
"""
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.graph.decision import Decision, Hop, Route, RouteSegment
from passes.graph.layouts import Layout, may_stay_sharded
from passes.graph.placement_graph import PlacementGraph, Value
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.op_rules.base import REPLICATE
from passes.sharding.grouping.op_groups import OpGroup
from passes.solver.verification import VerificationError


@dataclass(frozen=True)
class _ValueReader:
    route: Route
    phase: Phase
    gradient: bool = False


class CommAttribution:
    """legs: all paid route segments with at least one collective. saved: values with the layout in which backward finds them.
    arrived: by index of a group, its `arrivals`. held: the values that forward saves for backward, including inputs sharded by
    rows."""

    def __init__(self, graph: PlacementGraph, groups: Sequence[OpGroup], held: frozenset[int], decision: Decision):
        self.graph, self.decision, self.held = graph, decision, held
        self.legs: list[RouteSegment] = []
        self.saved: dict[int, Layout] = {}
        self.arrived: dict[int, dict[int, Route]] = {}
        self._made: dict[int, Layout] = dict(decision.inputs)
        self._made_in: dict[int, Phase] = {
            v.index: BACKWARD if v.kind == "tangent" else FORWARD for v in graph.values if v.producer is None}
        self._readers: dict[int, list[_ValueReader]] = defaultdict(list)
        for group in groups:
            for i in group.operations:
                self._made.update(zip(graph.operations[i].outputs, decision.operations[i].outputs))
                self._made_in.update(dict.fromkeys(graph.operations[i].outputs, group.phase))
        for group in groups:
            self._group(group)
        self._outputs()
        for value in graph.values:
            self.legs += (leg for leg in self._of(value) if leg.start < leg.stop)
        trained = graph.gradients
        for v, route in decision.held.items():
            self._check(route, v, decision.inputs[v], decision.stored(v))
            self.legs += [RouteSegment(route, 0, len(route.hops), held=True)] if v in trained else []

    def _group(self, group: OpGroup) -> None:
        """Values that the group reads from outside; its operations may only slice those, and each other's results."""
        own = {v for i in group.operations for v in self.graph.operations[i].outputs}
        arrived = self.arrived[group.index] = arrivals(self.graph, group, self.decision)
        for i in group.operations:
            for position, (v, wanted) in enumerate(zip(self.graph.operations[i].inputs, self.decision.operations[i].inputs)):
                route = self.decision.routes[i, position]
                self._check(route, v, wanted)
                first = Route(v, route.source) if v in own else arrived[v]
                done = len(first.hops)
                if route.hops[:done] != first.hops or not all(
                    _is_slice(route.layout(k), route.layout(k + 1)) for k in range(done, len(route.hops))
                ):
                    raise VerificationError(f"{self._name(v)} is redistributed inside a group: {route}")
        for v, route in arrived.items():
            self._readers[v].append(_ValueReader(route, group.phase))

    def _outputs(self) -> None:
        for (v, owner), route in zip(self.graph.outputs, self.decision.outputs, strict=True):
            self._check(route, v, self._wanted(v, route) if owner is None else self.decision.stored(owner))
            self._readers[v].append(_ValueReader(route, self._made_in[v], owner in self.graph.gradients))

    def _wanted(self, v: int, route: Route) -> Layout:
        """The layout in which a value that is no gradient is returned."""
        if v not in self.graph.unread or not all(
                may_stay_sharded(self.graph.values[v], p, axis) for p, axis in zip(route.target, self.decision.axes)):
            return (REPLICATE,) * len(self.decision.axes)
        tangent = self.graph.unread[v]
        return route.target if tangent is None else self.decision.inputs[tangent]

    def _check(self, route: Route, v: int, wanted: Layout, made: Layout | None = None) -> None:
        made = self._made[v] if made is None else made
        if (route.value, route.source, route.target) != (v, made, wanted):
            raise VerificationError(
                f"{self._name(v)} is made as {made} and read as {wanted}, which this does not lead to: {route}")

    def _of(self, value: Value) -> Iterator[RouteSegment]:
        v, start = value.index, 0
        forward = [r for r in self._readers[v] if r.phase == FORWARD]
        backward = [r for r in self._readers[v] if r.phase == BACKWARD]
        there_anyway = value.producer is None and v not in self.held
        kept = bool(backward) and self._made_in[v] == FORWARD and not there_anyway
        if v in self.held and (kept or value.producer is not None):
            self.saved[v] = self._copy(v, FORWARD) if kept else self._made[v]
        if kept or len(forward) > 1:
            stop = self._shared(v, forward + backward * kept, 0, FORWARD)
            yield RouteSegment(_part((forward or backward)[0].route, stop), 0, stop)
            yield from self._own(forward, stop, FORWARD)
            start = stop if kept else 0
        else:
            yield from self._own(forward, 0, FORWARD)
        if len(backward) > 1:
            stop = self._shared(v, backward, start, BACKWARD)
            yield RouteSegment(_part(backward[0].route, stop), start, stop)
            start = stop
        yield from self._own(backward, start, BACKWARD)

    def _copy(self, v: int, phase: Phase) -> Layout:
        if (v, phase) not in self.decision.copies:
            raise VerificationError(f"several read {self._name(v)} in {phase}, but share no copy of it")
        return self.decision.copies[v, phase]

    def _shared(self, v: int, readers: Sequence[_ValueReader], start: int, phase: Phase) -> int:
        """Number of collectives after which all readers have reached the copy, on one route from collective `start` on."""
        layout, hops = self._copy(v, phase), readers[0].route.hops
        found = (k for k in range(start, len(hops) + 1) if readers[0].route.layout(k) == layout)
        stop = next(found, None)
        if stop is None or any(r.route.hops[:stop] != hops[:stop] for r in readers):
            raise VerificationError(f"readers of {self._name(v)} in {phase} do not meet at its copy in {layout}")
        self._check_phase(v, hops[start:stop], phase)
        return stop

    def _own(self, readers: Sequence[_ValueReader], start: int, phase: Phase) -> Iterator[RouteSegment]:
        for r in readers:
            self._check_phase(r.route.value, r.route.hops[start:], phase)
            yield RouteSegment(r.route, start, len(r.route.hops), r.gradient)

    def _check_phase(self, v: int, hops: Sequence[Hop], phase: Phase) -> None:
        if any(hop.phase != phase for hop in hops):
            raise VerificationError(f"{self._name(v)} moves in another phase than {phase}: {hops}")

    def _name(self, v: int) -> str:
        return self.graph.values[v].name


def arrivals(graph: PlacementGraph, group: OpGroup, decision: Decision) -> dict[int, Route]:
    """The common prefix of routes of each value that a group reads; operations slice from its end."""
    found: dict[int, Route] = {}
    for i in group.operations:
        for position, v in enumerate(graph.operations[i].inputs):
            if v in group.inputs:
                route = decision.routes[i, position]
                shared = found.get(v, route)
                pairs = zip(shared.hops, route.hops)
                found[v] = _part(shared, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return found


def _part(route: Route, stop: int) -> Route:
    return Route(route.value, route.source, route.hops[:stop])


def _is_slice(layout: Layout, after: Layout) -> bool:
    return all(p == q or (p == REPLICATE and isinstance(q, tuple)) for p, q in zip(layout, after))


def readers_of(graph: PlacementGraph, decision: Decision) -> dict[tuple[int, Route], str]:
    """(value, route to a layout of it) -> the first operation that reads it there, or continues from there."""
    found: dict[tuple[int, Route], str] = {}
    for (index, _), route in decision.routes.items():
        for stop in range(len(route.hops) + 1):
            found.setdefault((route.value, _part(route, stop)), graph.operations[index].name)
    for v, route in decision.held.items():
        if graph.values[v].users:
            found[v, route] = graph.operations[graph.values[v].users[0]].name
    return found
