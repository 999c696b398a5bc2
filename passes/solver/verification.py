"""Verify a solution with independent code: nothing here is shared with the reduction, the ILP or its path tables."""
from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from passes.solver.problem import Arc, Edge, Label, Problem, Solution

TOLERANCE = 1e-9  # relative, of sums of floats added up in another order


class VerificationError(AssertionError):
    """A solution is not what it claims to be. This is a bug in the planner, not an error in its input."""


def check(problem: Problem, solution: Solution) -> None:
    """Recompute the figures of `solution`. Raises `VerificationError`, with both figures, where one is wrong."""
    if solution.status in ("infeasible", "no_solution"):
        return
    if len(solution.chosen) != len(problem.entities) or len(solution.paths) != len(problem.edges):
        raise VerificationError(
            f"{len(solution.chosen)} choices and {len(solution.paths)} paths "
            f"for {len(problem.entities)} entities and {len(problem.edges)} edges"
        )
    for entity, choice in zip(problem.entities, solution.chosen, strict=True):
        if not 0 <= choice < len(entity.choices):
            raise VerificationError(f"entity {entity.name!r} takes choice {choice} of {len(entity.choices)}")

    pairs = list(zip(problem.entities, solution.chosen, strict=True))
    terms = [entity.multiplicity * entity.choices[choice].cost for entity, choice in pairs]
    graphs: dict[int, _Graph] = {}  # by identity: arcs are shared between edges
    for edge, path in zip(problem.edges, solution.paths, strict=True):
        if id(edge.arcs) not in graphs:
            graphs[id(edge.arcs)] = _graph(edge.arcs)
        graph = graphs[id(edge.arcs)]
        terms.append(edge.multiplicity * _check_path(problem, edge, path, graph, solution.chosen))
    _compare("cost", solution.cost, math.fsum(terms))

    for k, (position, claimed) in enumerate(zip(problem.positions, solution.held_bytes, strict=True)):
        held = math.fsum(entity.multiplicity * entity.choices[choice].held_bytes[k] for entity, choice in pairs)
        _compare(f"held_bytes at {position!r}", claimed, held)
        if problem.budget_bytes is not None and held > problem.budget_bytes:
            raise VerificationError(f"{held:.0f} bytes are held at {position!r}, the budget is {problem.budget_bytes:.0f}")
    if solution.bound > solution.cost * (1 + TOLERANCE):
        raise VerificationError(f"bound {solution.bound!r} lies above the cost {solution.cost!r}")


_Graph = dict[Label, list[tuple[Label, float]]]


def _graph(arcs: Iterable[Arc]) -> _Graph:
    graph: _Graph = {}
    for arc in arcs:
        graph.setdefault(arc.source, []).append((arc.target, arc.cost))
    return graph


def _dijkstra(graph: _Graph, source: Label, target: Label) -> float:
    """The cost of the cheapest path from `source` to `target`, inf if there is none."""
    queue, done = [(0.0, source)], set()
    while queue:
        cost, label = heapq.heappop(queue)
        if label == target:
            return cost
        if label not in done:
            done.add(label)
            for following, step in graph.get(label, ()):
                heapq.heappush(queue, (cost + step, following))
    return math.inf


def _check_path(problem: Problem, edge: Edge, path: tuple[Arc, ...], graph: _Graph, chosen: tuple[int, ...]) -> float:
    """The cost of one instance of `edge`, checked: the path is one of its arcs' paths and none is cheaper."""
    supplied = problem.entities[edge.source].choices[chosen[edge.source]].outputs[edge.source_port]
    demanded = problem.entities[edge.target].choices[chosen[edge.target]].inputs[edge.target_port]
    if demanded is None or supplied == demanded:
        if path:
            raise VerificationError(f"edge {edge.name!r} takes {len(path)} arcs from {supplied} to {demanded}, not 0")
        return 0.0
    here = supplied
    for arc in path:
        if arc.source != here or (arc.target, arc.cost) not in graph.get(arc.source, ()):
            raise VerificationError(f"edge {edge.name!r} is at {here} and has no arc {arc}")
        here = arc.target
    if supplied is None or here != demanded:
        raise VerificationError(f"edge {edge.name!r} ends at {here}, demanded is {demanded} (supplied {supplied})")
    cost = _dijkstra(graph, supplied, demanded)
    _compare(f"cost of the path of edge {edge.name!r}", math.fsum(arc.cost for arc in path), cost)
    return cost


def _compare(name: str, claimed: float, recomputed: float) -> None:
    if not abs(claimed - recomputed) <= TOLERANCE * max(abs(claimed), abs(recomputed)):
        raise VerificationError(f"{name}: claimed {claimed!r}, recomputed {recomputed!r}")
