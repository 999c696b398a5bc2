"""Plan one joint graph: try the meshes, keep the cheapest answer, and say it in the words of a `Plan`."""
from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planning import measurements
from hpml_compiler.planning.reuse import Pins, decided_as, pins_of
from hpml_compiler.plans.plan import Plan
from hpml_compiler.plans.record import graph_plan
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.presets import before_planning
from hpml_compiler.visualize.text import format_bytes
from passes.annotations import read
from passes.costs.energy import capped_cluster
from passes.costs.prices import Measured, MeshPrices
from passes.errors import BadInput, Infeasible
from passes.graph.decision import Decision
from passes.graph.interface import GraphInput, Interface
from passes.graph.keys import INTERFACE, OPERATIONS
from passes.graph.placement_graph import PlacementGraph
from passes.machine.cluster import Cluster
from passes.machine.mesh import Mesh, enumerate_meshes, mesh_from_pin
from passes.partition.objective import in_time, minimized_first
from passes.partition.place import Placed, place
from passes.partition.state import StateModel
from passes.result import attribute_of
from passes.rules.base import Rule
from passes.solve.solvers import SolverOptions

log = logging.getLogger("hpml")


@dataclass
class Annotated:
    """A joint graph with what planning needs to know of it."""

    gm: GraphModule
    interface: Interface
    graph: PlacementGraph
    rules: Sequence[Rule | None]
    inputs: Sequence[GraphInput]
    seconds: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """The graph without what differs from process to process: equal on ranks that run the same program."""
        lines = []
        for node in self.gm.graph.nodes:
            value = node.meta.get("val")
            shape = tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))
            kwargs = {k: v.type if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}  # each has its own
            lines.append(f"{node.name} = {node.op} {node.target} {node.args} {kwargs} -> {shape}")
            if node.op == "get_attr" and isinstance(called := attribute_of(self.gm, node), GraphModule):
                lines.append(called.code)
        return "\n".join(lines)

    def hash(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Planned:
    """What every rank needs to rewrite its graph, and the record for people."""

    mesh: dict[str, int]
    decision: Decision
    record: GraphPlan
    rejected: tuple[MeshAttempt, ...]
    cluster: str = ""

    def with_record(self, record: GraphPlan) -> Planned:
        return replace(self, record=record)


def annotate(gm: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int | None) -> Annotated:
    """Run the passes that planning needs over a traced graph. `forward_outputs` is None for a forward graph."""
    start = time.perf_counter()
    before_planning(inputs, forward_outputs)(gm)
    operations = read(OPERATIONS, gm)
    return Annotated(gm, read(INTERFACE, gm), operations.graph, operations.rules, inputs,
                     {"annotate": time.perf_counter() - start})


def candidate_meshes(options: Options, cluster: Cluster, fixed: Mapping[str, int] | None) -> list[Mesh]:
    """The mesh in use, the pinned one, the one of a given plan, or all of one and two axes."""
    pin = fixed or options.mesh
    if pin is None and options.plan is not None:
        pin = options.load_plan().mesh  # type: ignore[union-attr]
    if pin:
        return [mesh_from_pin(pin, cluster)]
    return sorted(enumerate_meshes(cluster, max_axes=2), key=lambda mesh: _off_hierarchy(mesh, cluster))


def _off_hierarchy(mesh: Mesh, cluster: Cluster) -> float:
    """How far the inner axis is from being a node: meshes that follow the links are tried first."""
    if len(mesh.shape) < 2:
        return math.inf if cluster.nodes > 1 else 0.0
    return abs(math.log(mesh.shape[-1] / cluster.devices_per_node)) if cluster.nodes > 1 else 1.0


def plan_graph(
    annotated: Annotated, options: Options, cluster: Cluster, *, fixed_mesh: Mapping[str, int] | None = None,
    name: str = "graph", rows: frozenset[str] = frozenset(), given: Plan | None = None,
    shorter: Annotated | None = None, further: int = 0, like: GraphPlan | None = None,
    quick: Measured | None = None,
) -> Planned:
    """Try every candidate mesh and keep the cheapest answer.

    A mesh whose bound is above the best answer so far is dropped without an answer. `like`: the plan of a graph of the
    same structure (`hpml_compiler.planning.reuse`), whose decisions are taken where they fit. `quick`: what prices are scaled
    by where no profile has anything. Raises Infeasible if no mesh meets the budget, with the smallest budget that any meets.
    """

    def search(pinned: Pins | None, mesh: Mapping[str, int] | None) -> Planned:
        return _search(annotated, options, cluster, mesh, name, rows, pinned, shorter, further, quick)

    if like is not None and given is None and (fixed_mesh is None or [*fixed_mesh.items()] == [*like.mesh.items()]):
        planned = decided_as(like, lambda pinned: search(pinned, like.mesh))
        if planned is not None:
            return planned
    return search(_pins(given, annotated), fixed_mesh)


def _search(
    annotated: Annotated, options: Options, cluster: Cluster, fixed_mesh: Mapping[str, int] | None, name: str,
    rows: frozenset[str], pinned: Pins | None, shorter: Annotated | None, further: int, quick: Measured | None,
) -> Planned:
    start = time.perf_counter()
    full_speed, cluster = cluster, capped_cluster(cluster, options.power_cap)
    budget = options.memory_budget if options.memory_budget is not None else cluster.device.memory_bytes
    state = StateModel(optimizer=float(options.optimizer_states))
    measured = measurements.load(options, cluster, annotated.hash()) or quick
    if measured is not None and cluster != full_speed:
        log.warning("%s: what was measured is of full speed: under the power cap of %g W, the roofline prices", name,
                    options.power_cap)
        measured = None
    meshes = candidate_meshes(options, cluster, fixed_mesh)
    best: tuple[Mesh, Placed] | None = None
    attempts: list[MeshAttempt] = []
    misses: list[Infeasible] = []
    for mesh in meshes:
        # The first mesh may take most of the time: with its answer, the bounds of the others often end them at once.
        left = options.time_limit - (time.perf_counter() - start)
        solver = SolverOptions(options.solver, max(0.7 * left, 1.0), options.gap, extra=dict(options.solver_options))
        axes = dict(zip(mesh.names, mesh.shape))
        times = MeshPrices(mesh, options.optimizer_states, measured)
        prices, others = minimized_first(times, mesh, options.objective)
        try:
            answer = place(
                annotated.graph, axes, prices, options=solver, state=state, other_prices=others,
                budget_bytes=float(budget), stored=annotated.interface.stored, rows=rows, pinned=pinned,
                cutoff_us=best[1].solution.objective_us if best else None,
                shorter=shorter.graph if shorter else None, further=further,
            )
        except Infeasible as error:
            misses.append(error)
            attempts.append(MeshAttempt(mesh=axes, objective_us=None, bound_us=None, reason=str(error.what),
                                        objective=options.objective))
            continue
        if isinstance(answer, Placed) and (
            best is None or answer.solution.objective_us < best[1].solution.objective_us
        ):
            if best is not None:
                attempts.append(_lost(*best, options))
            best = (mesh, answer)
        elif isinstance(answer, Placed):
            attempts.append(_lost(mesh, answer, options))
        else:
            attempts.append(MeshAttempt(mesh=axes, objective_us=None, bound_us=_finite(answer.bound_us),
                                        reason="its bound is above the best answer", objective=options.objective))
    if best is None:
        raise _nothing_fits(misses, budget)
    mesh, (answer, energy_j) = best[0], in_time(best[1], best[0], options.objective)
    seconds = {**annotated.seconds, "solve": time.perf_counter() - start}
    record = graph_plan(annotated, mesh, answer, name=name, seconds=seconds, shortened=shorter is not None,
                        objective=options.objective, energy_j=energy_j,
                        prices=MeshPrices(mesh, options.optimizer_states, measured))
    if record.memory.peak > budget:
        over = record.memory.peak - budget
        log.warning(
            "%s: what is held through the step fits %s per device, but the largest call takes %s more for a moment; if "
            "that runs out of memory, give memory_budget %s", name, format_bytes(budget), format_bytes(over),
            format_bytes(max(budget - over, 0)),
        )
    return Planned(dict(zip(mesh.names, mesh.shape)), answer.decision, record, tuple(attempts), str(cluster))


def _pins(given: Plan | None, annotated: Annotated) -> Pins | None:
    if given is None:
        return None
    digest = annotated.hash()
    for graph in given.graphs:
        if graph.graph_hash == digest:
            return pins_of(graph)
    return None


def _lost(mesh: Mesh, answer: Placed, options: Options) -> MeshAttempt:
    return MeshAttempt(mesh=dict(zip(mesh.names, mesh.shape)), objective_us=answer.solution.objective_us,
                       bound_us=_finite(answer.solution.bound_us), reason="dearer", objective=options.objective)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nothing_fits(misses: Sequence[Infeasible], budget: float) -> Exception:
    known = [e for e in misses if getattr(e, "smallest_budget_bytes", None) is not None]
    if not known:
        return misses[0] if misses else BadInput("no mesh gave an answer in time", "solver",
                                                 "raise time_limit, or pin the mesh")
    least = min(known, key=lambda e: e.smallest_budget_bytes)  # type: ignore[attr-defined]
    return least
