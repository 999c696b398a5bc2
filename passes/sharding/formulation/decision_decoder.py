"""Decode the solution of a placement problem into layouts and routes of the unfolded graph."""
from __future__ import annotations

from passes.graph.decision import Decision, Hop, OperationLayouts, Route
from passes.graph.layouts import Layout, parse_layout
from passes.graph.step_phase import FORWARD, Phase
from passes.json_records import FrozenMap
from passes.op_rules.base import REPLICATE
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.formulation.problem_edges import Chain
from passes.sharding.formulation.problem_entities import Pin, Port
from passes.sharding.strategies.mesh_strategies import slices
from passes.solver.problem import Solution


def pins(built: PlacementProblem, solution: Solution) -> dict[str, Pin]:
    """The chosen strategy of each entity, as pins that reproduce the solution."""
    return {
        draft.name: (choice.inputs, choice.outputs) for draft, k in zip(built.entities.drafts, solution.chosen)
        if draft.kind != "output" for choice in [draft.options[k].choice]
    }


def decode(built: PlacementProblem, solution: Solution) -> Decision:
    """Layouts of every operation of the unfolded graph, and the route of every operand and output."""
    graph, entities, edges = built.graph, built.entities, built.edges
    operations: dict[int, OperationLayouts] = {}
    routes: dict[tuple[int, int], Route] = {}
    source = {v: _supplied(built, port, solution) for v, port in edges.sources.items()}
    for group in built.groups:
        number = entities.of_group[group.index]
        arrived = {v: _route(v, source[v], edges.reads[group.index, v], solution) for v in group.inputs}
        inside: dict[int, Layout] = {}
        choice = entities.drafts[number].options[solution.chosen[number]].group
        assert choice is not None, "groups choose among those of their operations"
        for index, row in zip(group.operations, choice.operations()):
            op = graph.operations[index]
            operations[index] = row
            for position, (v, wanted) in enumerate(zip(op.inputs, row.inputs)):
                route = arrived[v] if v in arrived else Route(v, inside[v])
                rest = slices(graph.values[v], route.target, wanted, built.axes)
                assert rest is not None, (op.name, route.target, wanted)
                hops = route.hops + tuple(Hop(layout, op.phase) for layout in rest)
                routes[index, position] = Route(v, route.source, hops)
            inside.update(zip(op.outputs, row.outputs))
    inputs = {v: _supplied(built, (number, 0), solution) for v, number in entities.of_input.items()}
    outputs = tuple(_returned(built, v, _route(v, source[v], edges.outputs[k], solution))
                    for k, (v, _) in enumerate(graph.outputs))
    return Decision(built.axes, FrozenMap(inputs), FrozenMap(operations), FrozenMap(routes), outputs,
                    FrozenMap(_copies(built, solution)), FrozenMap(_held(built, solution)))


def _returned(built: PlacementProblem, v: int, route: Route) -> Route:
    """The route of an output. An output that need not be read and is already replicated stays replicated, unless its
    gradient's layout is sharded: slicing is free, but reading the slices later is not."""
    hops = list(route.hops)
    if built.graph.unread.get(v, v) is None:
        while hops and _splits(route.layout(len(hops) - 1), route.layout(len(hops))):
            hops.pop()
    return Route(v, route.source, tuple(hops))


def _splits(layout: Layout, after: Layout) -> bool:
    return all(p in (q, REPLICATE) for p, q in zip(layout, after))


def _held(built: PlacementProblem, solution: Solution) -> dict[int, Route]:
    found = {}
    for v, number in built.entities.of_input.items():
        stored, *way = built.entities.drafts[number].options[solution.chosen[number]].gathered or ((),)
        if way:
            found[v] = Route(v, stored, tuple(Hop(layout, FORWARD) for layout in way))
    return found


def _copies(built: PlacementProblem, solution: Solution) -> dict[tuple[int, Phase], Layout]:
    chains = [(v, chain) for (_, v), chain in built.edges.reads.items()]
    chains += [(v, built.edges.outputs[k]) for k, (v, _) in enumerate(built.graph.outputs)]
    return {
        (v, phase): _supplied(built, (built.problem.edges[edge].target, 0), solution)
        for v, chain in chains for edge, phase in chain[:-1]  # the last edge of a chain belongs to the reader
    }


def _supplied(built: PlacementProblem, port: Port, solution: Solution) -> Layout:
    entity, k = port
    return built.entities.drafts[entity].options[solution.chosen[entity]].outputs[k]


def _route(v: int, source: Layout, chain: Chain, solution: Solution) -> Route:
    hops = [Hop(parse_layout(arc.target), phase) for edge, phase in chain for arc in solution.paths[edge]]
    return Route(v, source, tuple(hops))
