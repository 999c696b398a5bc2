"""The oracle for small problems: enumerate all assignments, with pruning of partial ones that already cost too much."""
from __future__ import annotations

import math
import time

from passes.solver.problem import Arc, Edge, Label, Problem, Solution

_Path = tuple[float, tuple[Arc, ...]]  # cost, arcs in order


def brute_force(problem: Problem) -> Solution:
    """The optimum of `problem` by depth-first enumeration, entity after entity; takes exponential time.

    A branch is cut when its cost plus the cheapest choice of every later entity is no better than the best so far, or
    when its bytes plus the lightest choices' exceed the budget at some position. Bytes should be whole numbers: other sums
    are rounded.
    Returns status "optimal" or "infeasible"; does not raise.
    """
    began = time.perf_counter()
    entities = problem.entities
    paths = [_paths(problem, edge) for edge in problem.edges]
    due: list[list[int]] = [[] for _ in entities]  # edges whose second end is decided with this entity
    for index, edge in enumerate(problem.edges):
        due[max(edge.source, edge.target)].append(index)
    cheapest = [0.0]  # of all entities from here on
    lightest = [(0.0,) * len(problem.positions)]
    for entity in reversed(entities):
        cheapest.insert(0, cheapest[0] + entity.multiplicity * min(choice.cost for choice in entity.choices))
        least = (min(helds) for helds in zip(*(choice.held_bytes for choice in entity.choices)))
        lightest.insert(0, tuple(after + entity.multiplicity * held for after, held in zip(lightest[0], least)))
    budget = math.inf if problem.budget_bytes is None else problem.budget_bytes
    best_cost, best = math.inf, None
    chosen: list[int] = []

    def path_of(index: int) -> _Path | None:
        edge = problem.edges[index]
        supplied = problem.supplied(edge, chosen[edge.source])
        return paths[index].get((supplied, problem.demanded(edge, chosen[edge.target])))

    def visit(spent: float, held: tuple[float, ...]) -> None:
        nonlocal best_cost, best
        position = len(chosen)
        if spent + cheapest[position] >= best_cost or any(a + b > budget for a, b in zip(held, lightest[position])):
            return
        if position == len(entities):
            best_cost, best = spent, tuple(chosen)
            return
        entity = entities[position]
        for number, choice in enumerate(entity.choices):
            chosen.append(number)
            met = [(problem.edges[index].multiplicity, path_of(index)) for index in due[position]]
            if all(path is not None for _, path in met):
                edges_cost = sum(multiplicity * path[0] for multiplicity, path in met if path is not None)
                visit(spent + entity.multiplicity * choice.cost + edges_cost,
                      tuple(a + entity.multiplicity * b for a, b in zip(held, choice.held_bytes)))
            chosen.pop()

    visit(0.0, (0.0,) * len(problem.positions))
    chosen = list(best or ())
    taken = [path_of(index) for index in range(len(problem.edges))] if best is not None else []
    return _solution(problem, best, best_cost, [path[1] for path in taken if path is not None], time.perf_counter() - began)


def _solution(problem: Problem, chosen: tuple[int, ...] | None, cost: float, paths: list[tuple[Arc, ...]],
              seconds: float) -> Solution:
    found = chosen is not None
    return Solution(
        status="optimal" if found else "infeasible", chosen=chosen or (), paths=tuple(paths), cost=cost,
        bound=cost, gap=0.0, variables=0, binaries=0, constraints=0, seconds=seconds, solver="brute force",
        held_bytes=problem.held_bytes(chosen) if chosen is not None else (math.inf,) * len(problem.positions),
        integral_relaxation=False,
    )


def _paths(problem: Problem, edge: Edge) -> dict[tuple[Label | None, Label | None], _Path]:
    """The cheapest path for each pair of labels that the choices may put on the edge, if there is one."""
    supplied = {problem.supplied(edge, choice) for choice in range(len(problem.entities[edge.source].choices))}
    demanded = {problem.demanded(edge, choice) for choice in range(len(problem.entities[edge.target].choices))}
    found: dict[tuple[Label | None, Label | None], _Path] = {}
    for label in supplied:
        from_label: dict[Label | None, _Path] = {label: (0.0, ())}
        for _ in edge.arcs:  # no cheapest path has more arcs than there are
            for arc in edge.arcs:
                if arc.source in from_label:
                    cost, path = from_label[arc.source]
                    if cost + arc.cost < from_label.get(arc.target, (math.inf, ()))[0]:
                        from_label[arc.target] = (cost + arc.cost, (*path, arc))
        from_label[None] = (0.0, ())  # demanding None is always possible
        found.update({(label, target): from_label[target] for target in demanded if target in from_label})
    return found
