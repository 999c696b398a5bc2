"""Lower bounds of a step in which communication overlaps computation, over all placements of a problem.

Computation runs in the order of the graph (`passes.simulation.rank_program`). Where an operation reads what the one before it
has made, in the same phase, nothing can be computed while that is redistributed: such communication counts in full. All other
communication slows down the computation beside it, and counts as far as that. Recomputation can be beside such communication
in backward. So the same problem with other prices has a bound
of the overlapped step: fewer choices are left to a solver than where the least computation and the least sum of all work are
bounded apart.

In a pipeline, each microbatch runs alone; what is done once, for parameters and their gradients, comes after the last of them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.cost_model.energy_model import Power
from passes.graph.layouts import parse_layout
from passes.graph.placement_graph import Value
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.formulation.problem_entities import EntityChoice
from passes.sharding.pricing.decision_terms import collective
from passes.sharding.search.mesh_placement import MeshPlacement
from passes.solver.ilp_search import solve
from passes.solver.problem import Arc, Edge, Entity, Problem
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

PARAMETER = "parameter"


@dataclass(frozen=True)
class OverlapShares:
    """Parts that count of communication beside computation: of activations, of parameters and gradients; of computation that no
    rows of the batch are in, such as the optimizer's; and of communication in backward beside which there is only
    recomputation."""

    activations: float
    parameters: float
    rare: float = 1.0
    recomputing: float = 1.0


def least_overlapped_us(placed: MeshPlacement, shares: OverlapShares, options: SolverOptions | None = None,
                        allowance: WorkLimit | None = None, layers: bool = False) -> float:
    """No placements of the problem take less on a rank. layers: of the repeated layers alone, where there are some. Raises
    OutOfTime where `allowance` is strict."""
    return solve(overlapped(placed, shares, layers), options, allowance=allowance).bound


def overlapped(placed: MeshPlacement, shares: OverlapShares, layers: bool = False) -> Problem:
    """The problem that was solved, at prices with overlap."""
    problem, solved = placed.problem, placed.solved
    waited, beside = edges_of_activations(problem)
    of_activations = {**dict.fromkeys(beside, shares.activations),
                      **{edge: shares.recomputing if phase == BACKWARD else 1.0 for edge, phase in waited.items()}}
    rare = min(shares.activations, shares.parameters)  # values that no rows of the batch are in, and no parameters
    priced, edges = dict[tuple[int, float], tuple[Arc, ...]](), list[Edge]()
    for number, edge in enumerate(solved.edges):
        ends = {solved.entities[end].kind for end in (edge.source, edge.target)}
        share = of_activations.get(number, shares.parameters if PARAMETER in ends else rare)
        key = id(edge.arcs), share
        if key not in priced:
            priced[key] = tuple(arc if _is_slice(arc) else replace(arc, cost=share * arc.cost) for arc in edge.arcs)
        edges.append(replace(edge, arcs=priced[key]))
    rows = {problem.entities.of_group[group.index] for group in problem.groups
            if any(problem.graph.values[v].batch for v in group.inputs)}
    entities = [_parameter(entity, draft.options, shares) if entity.kind == PARAMETER
                else entity if number in rows else _scaled(entity, shares.rare)
                for number, (entity, draft) in enumerate(zip(solved.entities, problem.entities.drafts, strict=True))]
    if layers:
        once = problem.problem
        entities = [replace(each, multiplicity=each.multiplicity - one.multiplicity)
                    for each, one in zip(entities, once.entities, strict=True)]
        edges = [replace(each, multiplicity=each.multiplicity - one.multiplicity)
                 for each, one in zip(edges, once.edges, strict=True)]
    return replace(solved, entities=tuple(entities), edges=tuple(edges))


def edges_of_activations(problem: PlacementProblem) -> tuple[dict[int, Phase], frozenset[int]]:
    """Edges of values with rows of the batch that an operation makes: those during which nothing else of the phase can be
    computed, in the order of the graph, with that phase; and others."""
    found: dict[int, bool] = {}
    phases: dict[int, Phase] = {}
    for (group, v), chain in problem.edges.reads.items():
        value = problem.graph.values[v]
        if value.producer is None or not value.batch:
            continue
        for edge, phase in chain:
            found[edge] = found.get(edge, True) and _waits(problem, value, group, edge, phase)
            phases[edge] = phase
    waited: dict[int, Phase] = {edge: phases[edge] for edge, waits in found.items() if waits}
    return waited, frozenset(found.keys() - waited)


def least_end_us(problem: PlacementProblem, lists: Sequence[str]) -> float:
    """Least computation on a rank, over all placements, of what comes after the repeated layers of these lists in forward, and
    before them in backward; 0 where that reads more than the layers, as then it may not stay together in a cut."""
    graph = problem.graph
    inside = {op.index for op in graph.operations if any(op.block.startswith(f"{path}.") for path in lists)}
    learned = {value.index for value in graph.values if value.kind == "parameter"}
    early, behind, back = set[int](), set[int](), set[int]()  # values
    elsewhere, after = {*inside}, set[int]()  # operations
    for op in graph.operations:
        depends = not learned.isdisjoint(op.inputs)
        learned.update(op.outputs if depends else ())
        if op.index in inside:
            (behind if op.phase == FORWARD else back).update(op.outputs)
        elif op.phase == FORWARD and behind.isdisjoint(op.inputs):
            if depends and any(graph.values[v].batch for v in op.inputs):
                early.update(op.outputs)
                elsewhere.add(op.index)
        elif not early.isdisjoint(op.inputs) and back.isdisjoint(op.inputs):
            return 0.0
        elif op.phase == FORWARD:
            behind.update(op.outputs)
            after.add(op.index)
        elif back.isdisjoint(op.inputs):
            after.add(op.index)
        else:
            back.update(op.outputs)
            elsewhere.add(op.index)
    return sum(min(choice.cost for choice in problem.problem.entities[problem.entities.of_group[group.index]].choices)
               for group in problem.groups if elsewhere.isdisjoint(group.operations)
               and not after.isdisjoint(group.operations) and any(graph.values[v].batch for v in group.inputs))


def least_above_idle_uj(placed: MeshPlacement, power: Power) -> float:
    """Least energy in µJ of the computation on a rank, over all placements of a problem at prices in µs, above that of an idle
    device: each group of operations at the least of their powers, or of that of communication, where it reduces inside."""
    problem, entities, found = placed.problem, placed.solved.entities, dict[int, float]()
    for group in problem.groups:
        kinds = {problem.graph.operations[k].kind for k in group.operations} - {"view"}
        watts = min((power.kernel_w(kind) for kind in kinds), default=power.idle_w)
        number = problem.entities.of_group[group.index]
        found[number] = min(found.get(number, watts), watts)
    total = 0.0
    for number, watts in found.items():
        reducing = min(watts, power.communication_w)
        total += entities[number].multiplicity * min(
            choice.cost * ((reducing if _reduces(option) else watts) - power.idle_w)
            for choice, option in zip(entities[number].choices, problem.entities.drafts[number].options, strict=True))
    return total


def _reduces(option: EntityChoice) -> bool:
    return option.group is not None and any(
        any(taken.reduced) for joint in option.group.combination for taken in joint.operations)


def _waits(problem: PlacementProblem, value: Value, group: int, edge: int, phase: Phase) -> bool:
    """True if the first operation that reads the value through this edge comes right after its producer, views aside, in the
    same phase and block."""
    graph = problem.graph
    assert value.producer is not None, "the caller checks it"
    made = graph.operations[value.producer]
    through = {g for (g, v), chain in problem.edges.reads.items() if v == value.index and (edge, phase) in chain}
    readers = [u for u in value.users if graph.operations[u].phase == phase
               and any(u in problem.groups[g].operations for g in through)]
    if not readers or made.phase != phase or graph.operations[readers[0]].block != made.block:
        return False
    return all(graph.operations[k].kind == "view" for k in range(made.index + 1, readers[0]))


def _parameter(entity: Entity, options: Sequence[EntityChoice], shares: OverlapShares) -> Entity:
    """The choices of a parameter: the optimizer's time, and that of gathering it where it is held unsharded."""
    update = {option.inputs: option.choice.cost for option in options if not option.gathered}
    return replace(entity, choices=tuple(replace(choice, cost=shares.rare * update[option.inputs] + shares.parameters * (
        choice.cost - update[option.inputs])) for choice, option in zip(entity.choices, options, strict=True)))


def _scaled(entity: Entity, share: float) -> Entity:
    return replace(entity, choices=tuple(replace(choice, cost=share * choice.cost) for choice in entity.choices))


def _is_slice(arc: Arc) -> bool:
    """True for a local step."""
    (changed,) = ((a, b) for a, b in zip(parse_layout(arc.source), parse_layout(arc.target), strict=True) if a != b)
    return collective(*changed) == "slice"
