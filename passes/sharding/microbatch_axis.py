"""Place every operation of a microbatched step before, in or after the microbatch loop.

This is a placement on one more axis, time, by the same rules as on devices:

    R     whole, before the loop: parameters and everything that does not depend on rows of the batch
    S     rows of one microbatch, in the loop
    P     partial, accumulated over the microbatches, in the loop
    after whole, after the loop

R becomes S by slicing rows, S becomes whole by concatenation, P by accumulation. A value after the loop never enters it
again: if a mean over all tokens divides gradients, the count of tokens has to be R, and the solver finds that. Every
placement is exact: the step computes what the whole batch computes. The best one leaves the least work outside the loop.

It is a problem of choices and prices like that of devices (`passes.solver`): an entity is one operation, an arc slices or
accumulates.
"""
from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from passes.graph.decision import AFTER, Decision, Hop, MicrobatchPlacement, OperationLayouts, Route
from passes.graph.layouts import legal
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.graph.step_phase import FORWARD, Phase
from passes.hardware.axis import Axis, time_axis
from passes.json_records import FrozenMap
from passes.op_rules.base import PARTIAL, REPLICATE, Placement, format_placement, parse_placement
from passes.solver.ilp_search import solve
from passes.solver.problem import Arc, Choice, Edge, Entity, Label, Problem
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

FLOPS_PER_US, BYTES_PER_US = 1e5, 1e4
"""Rough speed of one core: only the ratio matters, and that prices stay within nine decades of each other."""
CALL_US, VIEW_US, LATER = 1.0, 0.01, 1.001


@dataclass(frozen=True)
class _TimeChoice:
    reads: tuple[Label, ...]
    makes: tuple[Label, ...]
    cost: float


def _work(graph: PlacementGraph, op: Operation) -> float:
    if op.kind == "view":
        return VIEW_US
    moved = sum(graph.values[v].bytes for v in {*op.inputs, *op.outputs})
    return CALL_US + op.flops / FLOPS_PER_US + moved / BYTES_PER_US


class _MicrobatchProblem:
    """The problem of one graph. may: by value, labels that its producer can give it."""

    def __init__(self, graph: PlacementGraph, axis: Axis):
        self.graph, self.axis = graph, axis
        self.may: list[set[Label]] = [{REPLICATE} for _ in graph.values]
        self.options = [self._options(op) for op in graph.operations]

    def _options(self, op: Operation) -> list[_TimeChoice]:
        work = _work(self.graph, op)
        found = [_TimeChoice((REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.outputs), work)]
        for s in op.in_time:
            reads, makes = tuple(map(format_placement, s.inputs)), tuple(map(format_placement, s.outputs))
            if all(p == REPLICATE for p in reads + makes) or not self._divides(op, s.inputs + s.outputs):
                continue
            if all(label in self.may[v] or isinstance(parse_placement(label), tuple) for v, label in zip(op.inputs, reads)):
                # A linear operation on partial sums runs whole, once for each microbatch.
                found.append(_TimeChoice(reads, makes, 0.0 if s.splits else self.axis.size * work))
        if any(self.may[v] != {REPLICATE} for v in op.inputs):
            found.append(_TimeChoice((AFTER,) * len(op.inputs), (AFTER,) * len(op.outputs), LATER * work))
        for option in found:
            for v, label in zip(op.outputs, option.makes):
                self.may[v].add(label)
        return found

    def _divides(self, op: Operation, placements: tuple[Placement, ...]) -> bool:
        return all(legal(self.graph.values[v], (p,), (self.axis,)) for v, p in zip((*op.inputs, *op.outputs), placements))

    def arcs(self, v: int) -> tuple[Arc, ...]:
        """A whole value that is sliced in the loop stays in memory while the loop runs, which costs more than sharding it."""
        us = self.graph.values[v].bytes / BYTES_PER_US
        split = sorted({label for u in self.graph.values[v].users for option in self.options[u]
                        for w, label in zip(self.graph.operations[u].inputs, option.reads) if w == v} | self.may[v])
        rows = [label for label in split if isinstance(_placement(label), tuple)]
        return (Arc(REPLICATE, AFTER, 0.0), Arc(PARTIAL, AFTER, CALL_US + self.axis.size * us),
                *(Arc(REPLICATE, label, CALL_US + 2 * us) for label in rows),
                *(Arc(label, AFTER, 2 * CALL_US + 2 * us) for label in rows))

    def problem(self) -> tuple[Problem, dict[int, int]]:
        """The problem, and operation -> its entity, for operations with a choice or on which a choice depends."""
        graph, entity_of = self.graph, {}
        entities: list[Entity] = []
        open_ = {op.index for op in graph.operations if len(self.options[op.index]) > 1}
        for op in graph.operations:
            if op.index in open_ or any(u in open_ for v in op.outputs for u in graph.values[v].users):
                entity_of[op.index] = len(entities)
                choices = tuple(Choice(o.cost, (0.0,), o.reads, o.makes) for o in self.options[op.index])
                entities.append(Entity(op.name, op.kind, 1, choices))
        made: dict[int, tuple[int, int, tuple[Arc, ...]]] = {}
        for index, number in entity_of.items():
            for port, v in enumerate(graph.operations[index].outputs):
                made[v] = (number, port, self.arcs(v))
        edges = [
            Edge(made[v][0], made[v][1], number, port, 1, made[v][2], graph.values[v].name)
            for index, number in entity_of.items() for port, v in enumerate(graph.operations[index].inputs) if v in made
        ]
        for v in dict.fromkeys(v for v, _ in graph.outputs):
            if v in made:
                edges.append(Edge(made[v][0], made[v][1], len(entities), 0, 1, made[v][2], graph.values[v].name))
                entities.append(Entity(f"output {graph.values[v].name}", "output", 1, (Choice(0.0, (0.0,), (AFTER,), ()),)))
        return Problem(tuple(entities), tuple(edges)), entity_of


LEAST_S = 10.0
"""Minimum time limit: the problem is small, and a bad answer would lose the requested microbatches."""


def solve_time_axis(graph: PlacementGraph, microbatches: int, options: SolverOptions | None = None,
                    allowance: WorkLimit | None = None) -> MicrobatchPlacement:
    """The best placement on the time axis of a graph that was analyzed for that many microbatches. allowance: replaces
    the options' time limit."""
    times = _MicrobatchProblem(graph, time_axis(microbatches))
    problem, entity_of = times.problem()
    if allowance is not None:
        allowance = allowance.part(max(allowance.left_s, LEAST_S))
    chosen = solve(problem, options, allowance=allowance).chosen if problem.entities else ()
    taken = [options[chosen[entity_of[k]] if k in entity_of else 0] for k, options in enumerate(times.options)]
    from_rows = _from_rows(graph)
    works = [_work(graph, op) if op.index in from_rows else 0.0 for op in graph.operations]
    outside = [all(label in (REPLICATE, AFTER) for label in o.reads + o.makes) for o in taken]
    whole = sorted((k for k, out in enumerate(outside) if out and works[k] > VIEW_US), key=lambda k: -works[k])
    inside = sum(work for work, out in zip(works, outside) if not out)
    return MicrobatchPlacement(microbatches, tuple(o.reads for o in taken), tuple(o.makes for o in taken),
                               inside / sum(works) if sum(works) else 0.0, tuple(graph.operations[k].name for k in whole))


def _from_rows(graph: PlacementGraph) -> set[int]:
    """Operations that depend on rows of the batch."""
    return {op.index for op in graph.operations if any(graph.values[v].batch for v in op.inputs)}


def _placement(label: Label) -> Placement:
    return REPLICATE if label == AFTER else parse_placement(label)


def replicated_decision(graph: PlacementGraph) -> Decision:
    """The decision on a mesh without axes: everything is whole."""
    return Decision(
        (), FrozenMap({v.index: () for v in graph.values if v.producer is None}),
        FrozenMap({op.index: OperationLayouts(((),) * len(op.inputs), ((),) * len(op.outputs), ((),) * len(op.outputs))
                   for op in graph.operations}),
        FrozenMap({(op.index, k): Route(v, ()) for op in graph.operations for k, v in enumerate(op.inputs)}),
        tuple(Route(v, ()) for v, _ in graph.outputs))


def with_time_axis(decision: Decision, graph: PlacementGraph, times: MicrobatchPlacement,
                   reduced: Container[int] = ()) -> Decision:
    """The decision with time as its last axis. Rows are sliced after redistribution between devices, and accumulated values are
    redistributed after accumulation: a gradient is accumulated in the loop, and reduced over devices once. Values that are
    never whole are redistributed inside the loop, and so are accumulated values in `reduced`."""
    made: dict[int, Placement] = {v: REPLICATE for v in decision.inputs}
    for op in graph.operations:
        made.update(zip(op.outputs, map(_placement, times.makes[op.index])))
    sums = {v for v, placement in made.items() if placement == PARTIAL and v not in reduced}
    decision = _reduced_later(decision, graph, sums)
    operations = {}
    routes = {}
    for op in graph.operations:
        rows, reads = decision.operations[op.index], tuple(map(_placement, times.reads[op.index]))
        makes = tuple(made[v] for v in op.outputs)
        operations[op.index] = OperationLayouts(*(
            tuple((*layout, p) for layout, p in zip(layouts, placements))
            for layouts, placements in ((rows.inputs, reads), (rows.made, makes), (rows.outputs, makes))))
        for k, (v, read) in enumerate(zip(op.inputs, reads)):
            routes[op.index, k] = _in_time(decision.routes[op.index, k], made[v], read, _phase(graph, v), op.phase)
    outputs = tuple(_in_time(route, made[route.value], REPLICATE, _phase(graph, route.value), FORWARD, route.value in reduced)
                    for route in decision.outputs)
    return replace(
        decision, axes=(*decision.axes, time_axis(times.microbatches)), operations=FrozenMap(operations),
        inputs=FrozenMap({v: (*layout, REPLICATE) for v, layout in decision.inputs.items()}), routes=FrozenMap(routes),
        outputs=outputs, copies=FrozenMap(), held=FrozenMap())


def _reduced_later(decision: Decision, graph: PlacementGraph, sums: Container[int]) -> Decision:
    """Move reductions of values that are sums over the loop from their producer to the routes of their readers."""
    operations = dict(decision.operations)
    first: dict[int, Route] = {}
    for op in graph.operations:
        rows = operations[op.index]
        for v, made, after in zip(op.outputs, rows.made, rows.outputs):
            if v in sums and made != after:
                changed = [axis for axis, (p, q) in enumerate(zip(made, after)) if p != q]
                first[v] = Route(v, made, tuple(Hop((*after[:axis + 1], *made[axis + 1:]), op.phase) for axis in changed))
        outputs = tuple(made if v in first else after for v, made, after in zip(op.outputs, rows.made, rows.outputs))
        operations[op.index] = replace(rows, outputs=outputs)
    if not first:
        return decision

    def from_sum(route: Route) -> Route:
        way = first.get(route.value)
        return route if way is None else Route(route.value, way.source, (*way.hops, *route.hops))

    return replace(decision, operations=FrozenMap(operations), outputs=tuple(map(from_sum, decision.outputs)),
                   routes=FrozenMap({key: from_sum(route) for key, route in decision.routes.items()}))


def _phase(graph: PlacementGraph, v: int) -> Phase:
    producer = graph.values[v].producer
    return FORWARD if producer is None else graph.operations[producer].phase


def _in_time(route: Route, made: Placement, read: Placement, making: Phase, reading: Phase, last: bool = False) -> Route:
    """The route on the time axis. making, reading: phases in which the value is computed, and read. last: it is collected from
    the loop after its redistribution between devices."""
    collected = made != REPLICATE and read == REPLICATE
    on_the_way = REPLICATE if collected and not last else made
    hops = [Hop((*hop.layout, on_the_way), hop.phase) for hop in route.hops]
    if collected and last:
        hops.append(Hop((*route.target, REPLICATE), making))
    elif collected:
        hops.insert(0, Hop((*route.source, REPLICATE), making))
    elif made != read:
        hops.append(Hop((*route.target, read), reading))
    return Route(route.value, (*route.source, made), tuple(hops))
