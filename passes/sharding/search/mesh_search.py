"""Find the cheapest placements over all meshes: each mesh is dropped once its bound exceeds the best answer so far."""
from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.batch_balance.row_counts import with_rows
from passes.cost_model.measured.mesh_prices import CachedMeasurements, MeshPrices
from passes.errors import BadInput, HpmlError, Infeasible
from passes.graph.layouts import Layout
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.axis import Axes
from passes.hardware.cluster import Cluster
from passes.hardware.gradient_compression import compressed_axes
from passes.hardware.mesh import Mesh, enumerate_meshes, mesh_from_pin
from passes.json_records import FrozenMap
from passes.sharding.formulation.placement_problem import MeshTables
from passes.sharding.formulation.problem_entities import Pin
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.sharding.search.search_objective import SearchObjective, minimized_first, priced_in_time
from passes.sharding.strategies.group_strategies import GroupStrategyCache
from passes.sharding.strategies.zero_levels import ZeroRules
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import OutOfTime, WorkLimit

FIRST = 0.9
"""Share of the remaining time that the next mesh may take."""
NO_TIME = "time_limit was over before anything was found"


@dataclass
class SearchTables:
    """Tables shared by searches of one graph that differ only in bytes: when they are counted, and the budget.
    by_mesh: choices and arcs, which take most of the time. joints: strategies on single axes, also for searches on other
    meshes."""

    by_mesh: dict[Mesh, MeshTables] = field(default_factory=dict)
    joints: GroupStrategyCache = field(default_factory=GroupStrategyCache)


@dataclass(frozen=True)
class SearchConfig:
    """Prices and constraints of a search.

    cluster: equal devices, at their actual speed. budget_bytes: of one device; None: its memory.
    optimizer_states: optimizer tensors per parameter. zero: how parameters may be stored. measured: source of
    measured prices; None: data sheets alone. solver: its time limit covers all meshes. rows: names of graph
    inputs sharded by rows. weights: by axis, the proportions of its coordinates' numbers of rows, 1 by default; None: only
    equal numbers of rows.
    shorter, further: the same model with one layer less, and how many layers the real model has beyond the graph.
    lifetimes: the points at which bytes are counted. resident_states: optimizer tensors in device memory; None: all. memos:
    tables of earlier searches that differ only in bytes. allowance: replaces the solver's time limit, for all meshes.
    compression: of gradients, by axis; local_ranks: ranks on a node for that, where they are not as the cluster says.
    """

    cluster: Cluster
    objective: SearchObjective = "time"
    budget_bytes: float | None = None
    optimizer_states: int = 2
    zero: ZeroRules = ZeroRules()
    measured: CachedMeasurements | None = None
    solver: SolverOptions = SolverOptions()
    rows: frozenset[str] = frozenset()
    weights: FrozenMap[str, tuple[int, ...]] | None = None
    shorter: PlacementGraph | None = None
    further: int = 0
    lifetimes: MemoryModel = STEP_PEAK
    resident_states: int | None = None
    memos: SearchTables | None = field(default=None, repr=False, compare=False)
    allowance: WorkLimit | None = field(default=None, repr=False, compare=False)
    compression: FrozenMap[str, str] = FrozenMap()
    local_ranks: int | None = None

    def axes_of(self, mesh: Mesh) -> Axes:
        return compressed_axes(mesh, self.compression, self.local_ranks or self.cluster.devices_per_node)

    @property
    def budget(self) -> float:
        return float(self.cluster.device.memory_bytes if self.budget_bytes is None else self.budget_bytes)

    @property
    def states_held(self) -> float:
        return float(self.optimizer_states if self.resident_states is None else self.resident_states)

    def axes(self, mesh: Mesh, graph: PlacementGraph) -> Axes:
        """The axes of a mesh, with numbers of rows where these are unequal."""
        axes = self.axes_of(mesh)
        return axes if self.weights is None else with_rows(axes, graph.rows, self.weights, graph.microbatches)

    def prices(self, mesh: Mesh) -> MeshPrices:
        return MeshPrices(mesh, self.optimizer_states, self.measured)


@dataclass(frozen=True)
class RejectedMesh:
    """A mesh that was tried and lost; cost: of the best placements on it, if any were found."""

    mesh: Mesh
    reason: str
    cost: float | None = None
    bound: float | None = None


@dataclass(frozen=True, repr=False)
class SearchResult:
    """placed: with its cost in µs, whatever the objective. energy_j: of a step on all devices. seconds: duration of the
    search."""

    mesh: Mesh
    placed: MeshPlacement
    energy_j: float
    rejected: tuple[RejectedMesh, ...]
    seconds: float

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self.mesh.axes)
        return f"Answer({axes or 'no axes'}: {self.placed.cost.step:.6g} us)"


def candidate_meshes(cluster: Cluster, pinned: Mapping[str, int] | None) -> list[Mesh]:
    """The pinned mesh, or all of one and two axes."""
    if pinned:
        if pinned.get("pp", 1) != 1:
            raise BadInput("nothing is split over the stages of a pipeline, which the axis pp is for", "mesh", "leave pp out")
        return [mesh_from_pin(pinned, cluster)]
    return sorted(enumerate_meshes(cluster, max_axes=2), key=lambda mesh: _off_hierarchy(mesh, cluster))


def _off_hierarchy(mesh: Mesh, cluster: Cluster) -> float:
    """Distance of the inner axis from the size of a node: meshes that follow the links are tried first, then the single-axis
    mesh, which takes a fifth of the time."""
    if len(mesh.shape) < 2:
        return 0.5 if cluster.nodes > 1 else 0.0
    return abs(math.log(mesh.shape[-1] / cluster.devices_per_node)) if cluster.nodes > 1 else 1.0


def search_meshes(graph: PlacementGraph, stored: Mapping[str, Layout], conditions: SearchConfig, meshes: Sequence[Mesh],
                  pinned: Mapping[str, Pin] | None = None) -> SearchResult:
    """The best answer over the meshes. stored: layouts of parameters that are fixed. pinned: choices of entities.

    Raises Infeasible, with the smallest budget that any mesh meets, BadInput for pins that cannot be met or if no answer is
    found in time, and DepthsDiffer where the shorter graph is not of the same model.
    """
    start, allowance = time.perf_counter(), conditions.allowance or WorkLimit(conditions.solver.seconds)
    allowance.spend("operation", len(graph.operations))
    best: tuple[Mesh, MeshPlacement] | None = None
    rejected: list[RejectedMesh] = []
    misses: list[Infeasible] = []
    memos = conditions.memos
    joints = GroupStrategyCache() if memos is None else memos.joints
    for mesh in meshes:
        if best is not None and allowance.is_over:
            rejected.append(RejectedMesh(mesh, NO_TIME))
            continue
        # The first mesh may take most of the time: its answer often lets the bounds of the others end them at once.
        part = allowance.part(max(FIRST * allowance.left_s, 0.0), strict=best is not None)
        memo = MeshTables(joints=joints)
        prices, others = minimized_first(conditions.prices(mesh), mesh, conditions.objective)
        try:
            answer = solve_on_mesh(
                graph, conditions.axes(mesh, graph), prices, other_prices=others,
                options=conditions.solver, allowance=part,
                state=TrainingStateModel(optimizer=conditions.states_held), budget_bytes=conditions.budget,
                stored=stored, rows=conditions.rows, zero=conditions.zero, pinned=pinned,
                cutoff=best[1].solution.cost if best else None,
                shorter=conditions.shorter, further=conditions.further,
                lifetimes=conditions.lifetimes, memo=memo if memos is None else memos.by_mesh.setdefault(mesh, memo),
            )
        except OutOfTime:
            rejected.append(RejectedMesh(mesh, NO_TIME))
            continue
        except Infeasible as error:
            misses.append(error)
            rejected.append(RejectedMesh(mesh, error.what))
            continue
        if not isinstance(answer, MeshPlacement):
            rejected.append(RejectedMesh(mesh, "its bound is above the best answer", None, _finite(answer.bound)))
        elif best is None or answer.solution.cost < best[1].solution.cost:
            rejected += [_dearer(*best)] if best is not None else []
            best = (mesh, answer)
        else:
            rejected.append(_dearer(mesh, answer))
    if best is None:
        raise _nothing_fits(misses)
    placed, energy_j = priced_in_time(best[1], best[0], conditions.objective)
    return SearchResult(best[0], placed, energy_j, tuple(rejected), time.perf_counter() - start)


def _dearer(mesh: Mesh, answer: MeshPlacement) -> RejectedMesh:
    return RejectedMesh(mesh, "dearer", answer.solution.cost, _finite(answer.solution.bound))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nothing_fits(misses: Sequence[Infeasible]) -> HpmlError:
    if not misses:
        return BadInput("no mesh gave an answer in time", "solver", "raise time_limit, or pin the mesh")
    budgets = [miss.smallest_budget_bytes or math.inf for miss in misses]
    return misses[budgets.index(min(budgets))]
