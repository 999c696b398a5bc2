"""Cost of the whole batch on each mesh that a stage may have: an estimate, and a lower bound, of all that may run on it."""
from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.joint.open_decisions import DATA_AXIS, TENSOR_AXIS, splits_of
from hpml_compiler.planner.joint.stage_cost import LeastOverlapped, LeastWork, StageCost
from hpml_compiler.planner.pipeline.pp_axis import cluster_of_stage
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.simulate.plan_prices import PlannedPrices
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.simulate.step_energy import Activity
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM
from passes.checkpointing.recompute_frontier import SavedChoice, recompute_frontier
from passes.cost_model.cost_terms import copy
from passes.cost_model.energy_model import Power, capped_cluster
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_copy import copy_graph
from passes.graph.step_phase import FORWARD
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.presets import building_storage_program
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.oracle.memory_model import MemoryModel
from passes.sharding.search.mesh_placement import MeshPlacement
from passes.sharding.search.mesh_search import SearchTables
from passes.sharding.search.overlap_bound import OverlapShares, least_above_idle_uj, least_end_us, least_overlapped_us
from passes.sharding.strategies.group_strategies import GroupStrategyCache
from passes.simulation.rank_lanes import CONTENTION
from passes.simulation.step_graph import StepGraph
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

LATER = 0.25
"""Part of the work limit for placements of the whole batch on one mesh."""


class MeshCosts:
    """annotated: the whole batch at once, of a few layers if `folded` says how many more there are. cluster: of all stages.
    seconds: time limit of the search. refusal: why there are no placements on the first mesh that has none. differs: why a few
    layers do not represent the model on the last mesh where that is so."""

    def __init__(self, traces: TracedModel, annotated: AnalyzedGraph, folded: FewLayerTrace | None, cluster: Cluster,
                 seconds: float):
        self.traces, self.annotated, self.folded, self.cluster, self.seconds = traces, annotated, folded, cluster, seconds
        self.joints = GroupStrategyCache()
        self.refusal: Infeasible | None = None
        self.differs: DepthsDiffer | None = None

    def all(self, meshes: Iterable[tuple[int, dict[str, int]]]) -> list[tuple[int, StageCost]]:
        """Costs on these numbers of stages and meshes of a stage. The first mesh of each tensor axis is placed, and that of the
        fewest ranks with the smallest one, whose kernels are the largest; all others follow from the former."""
        meshes = [*meshes]
        found, of_tensor, from_us = list[tuple[int, StageCost]](), dict[int, StageCost](), dict[int, float]()
        largest = min(meshes, key=lambda each: (-each[0], each[1].get(TENSOR_AXIS, 1)), default=None)
        for stages, mesh in meshes:
            known = None if (stages, mesh) == largest else of_tensor.get(mesh.get(TENSOR_AXIS, 1))
            moved_us = self._moved_us(stages, mesh)
            cost = self.exact(stages, mesh) if known is None else known.on(
                mesh, moved_us / from_us[known.tensor] if from_us[known.tensor] else 1.0)
            if cost is not None and cost.tensor not in of_tensor:
                of_tensor[cost.tensor], from_us[cost.tensor] = cost, moved_us
            if cost is not None:
                found.append((stages, cost))
        return found

    def _moved_us(self, stages: int, mesh: dict[str, int]) -> float:
        """Time to gather all parameters over the ranks of a stage that rows are split over, and to reduce their gradients."""
        prices = MeshPrices(mesh_from_pin(mesh, cluster_of_stage(self.cluster, stages)), self.traces.options.optimizer_states)
        nbytes = sum(self.traces.trained.values()) / mesh.get(TENSOR_AXIS, 1)
        return sum(prices.collective(kind, axis, nbytes) for axis, name in enumerate(prices.mesh.names) if name == DATA_AXIS
                   for kind in ("all_gather", "reduce_scatter"))

    def least(self, costs: list[tuple[int, StageCost]]) -> LeastWork:
        """The least over all meshes."""
        folded = self.folded
        found = LeastWork(layers=0 if folded is None or len(folded.lists) > 1 else folded.layers, saved=self._frontier())
        for stages, cost in costs:
            found = found.with_another(cost, stages)
        return found

    def exact(self, stages: int, mesh: dict[str, int], limit: WorkLimit | None = None) -> StageCost | None:
        """Placements of the whole batch on the ranks of a stage; None where their parameters alone do not fit, or where a few
        layers do not represent the model. Unsharded parameters may stay in memory, as under a memory budget."""
        options, folded, within = self.traces.options, self.folded, WorkLimit(LATER * self.seconds)
        cluster, budget = cluster_of_stage(self.cluster, stages), stages * memory_limit(options, self.cluster)
        own = options.model_copy(update={"mesh": mesh or None, "memory_budget": budget, "microbatches": 1, "recompute": {},
                                         "schedule": "auto", "virtual_stages": 1, "objective": "time"})
        part, bounds = within if limit is None else limit.part(within.seconds), list[tuple[LeastOverlapped, float, float]]()
        power = Power.of(capped_cluster(cluster, options.power_cap).device)
        plan = partial(plan_graph, self.annotated, own, cluster, lifetimes=MemoryModel(0.0), budget_bytes=budget,
                       allowance=part, quick=self.traces.quick, shorter=None if folded is None else folded.shorter,
                       further=0 if folded is None else folded.further)
        placed_uj = list[float]()
        try:
            planned = plan(memos=SearchTables(joints=self.joints), inspect=lambda placed, solver: bounds.append((
                self._bounds(placed, solver, stages, part), least_end_us(placed.problem, self._lists),
                least_above_idle_uj(placed, power))))
            if options.objective == "energy":
                plan(memos=SearchTables(joints=self.joints), objective="above_idle",
                     inspect=lambda placed, _: placed_uj.append(placed.solution.bound or 0.0))
        except Infeasible as error:
            self.refusal = self.refusal or error
            return None
        except DepthsDiffer as error:
            self.differs = error
            return None
        record, trained = planned.record, sum(self.traces.trained.values())
        largest = max((nbytes for each in record.operations.values() for nbytes in each.result_bytes), default=0)
        step = step_graph(record, PlannedPrices(record))
        prices = MeshPrices(mesh_from_pin(planned.mesh, cluster), options.optimizer_states)
        parameter_us, repeated_us = _parameter_us(step, record.parameters)
        layers_us, forward_us = _layers_us(step, self._lists)
        overlapped, end_us, least_uj = bounds[0]
        computed, moved = (Activity.of_runs(calls, hops) for calls, hops in (
            ([(call.runs, call) for call in step.calls], ()),
            ((), [(leg.multiplicity, hop) for leg in step.legs for hop in leg.hops])))
        return StageCost(
            mesh, record.predicted.step_time_us, record.solver.bound or 0.0,
            (2 + options.resident_states) * trained / splits_of(mesh), float(record.memory.activations), float(largest),
            self._output_bytes() / math.prod(mesh.values()), parameter_us,
            record.predicted.compute_us, trained, layers_us, end_us, forward_us / layers_us if layers_us else 0.0,
            repeated_us, copy(3.0 * trained / mesh.get(TENSOR_AXIS, 1), prices), overlapped=overlapped,
            compute_w=computed.mean_w(power), moved_w=moved.mean_w(power), least_uj=least_uj,
            placed_uj=sum(placed_uj))

    def _bounds(self, placed: MeshPlacement, solver: SolverOptions, stages: int, limit: WorkLimit) -> LeastOverlapped:
        beside = CONTENTION[self.cluster.device.kind] - 1.0
        least = partial(least_overlapped_us, placed, options=solver, allowance=limit)
        if stages == 1:
            return LeastOverlapped(least(OverlapShares(beside, beside)),
                                   recomputing_us=least(OverlapShares(beside, beside, recomputing=beside)))
        inside, further = OverlapShares(beside, 0.0, 0.0), 0 if self.folded is None else self.folded.further
        return LeastOverlapped(least(OverlapShares(beside, 1.0)), least(inside),
                               least(inside, layers=True) / further if further else 0.0)

    @property
    def _lists(self) -> Sequence[str]:
        return () if self.folded is None else self.folded.lists

    def _frontier(self) -> tuple[SavedChoice, ...]:
        """Frontier of one repeated layer, unsharded and with the whole batch; () where no few layers stand for the others."""
        folded, options, annotated = self.folded, self.traces.options, self.annotated
        if folded is None or len(folded.lists) > 1 or options.offloads("saved"):
            return ()
        gm, whole = copy_graph(annotated.gm), mesh_from_pin({DATA_AXIS: self.cluster.world_size}, self.cluster)
        building_storage_program(BuildStorageProgram(
            annotated.interface.forward_outputs, MeshPrices(whole, options.optimizer_states), options.compiler != "eager",
            device=self.cluster.device.kind))(gm)
        program, layer = read(STORAGE_PROGRAM, gm), folded.blocks[0][1]
        return recompute_frontier(program, {k for k, run in enumerate(program.runs) if not run.backward and run.block == layer})

    def _output_bytes(self) -> float:
        graph = self.annotated.graph
        return float(sum(graph.values[graph.outputs[each.number][0]].bytes for each in self.annotated.interface.unread))


def _parameter_us(step: StepGraph, parameters: Collection[str]) -> tuple[float, float]:
    """Time of communication of parameters and their gradients; and if they are gathered in forward and in backward."""
    gathers, reductions = (sum(leg.multiplicity * hop.us for leg in step.legs if leg.gradient == reduces and (
        reduces or leg.value in parameters) for hop in leg.hops) for reduces in (False, True))
    return gathers + reductions, max(gathers, 2 * min(gathers, reductions)) + reductions


def _layers_us(step: StepGraph, lists: Sequence[str]) -> tuple[float, float]:
    """Computation of all repeated layers, and of their forward."""
    calls = [call for call in step.calls if any(call.block.startswith(f"{path}.") for path in lists)]
    return sum(call.runs * call.us for call in calls), sum(call.runs * call.us for call in calls if call.phase == FORWARD)
