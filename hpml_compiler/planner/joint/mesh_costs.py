"""Cost of the whole batch on each mesh that a stage may have: an estimate, and a lower bound, of all that may run on it."""
from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.joint.joint_candidate import LeastWork, StageCost
from hpml_compiler.planner.joint.open_decisions import TENSOR_AXIS
from hpml_compiler.planner.pipeline.pp_axis import cluster_of_stage
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.simulate.plan_prices import PlannedPrices
from hpml_compiler.simulate.plan_step_graph import step_graph
from passes.errors import Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.step_phase import FORWARD
from passes.hardware.cluster import Cluster
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.oracle.memory_model import MemoryModel
from passes.sharding.search.mesh_search import SearchTables
from passes.sharding.strategies.group_strategies import GroupStrategyCache
from passes.simulation.step_graph import StepGraph
from passes.solver.work_limit import WorkLimit

LATER = 0.25
"""Part of the work limit for placements of the whole batch on one mesh."""
ALL_MESHES = 2.0
"""Multiple of the work limit for placements of the whole batch, over all meshes, whose work is counted too high: enough for the
28 meshes of GPT-3 175B, which take 14 s of CPU time, and for half of the 73 of a model with a trillion parameters."""


class MeshCosts:
    """annotated: the whole batch at once, of a few layers if `folded` says how many more there are. cluster: of all stages.
    seconds: time limit of the search. refusal: why there are no placements on the first mesh that has none."""

    def __init__(self, traces: TracedModel, annotated: AnalyzedGraph, folded: FewLayerTrace | None, cluster: Cluster,
                 seconds: float):
        self.traces, self.annotated, self.folded, self.cluster, self.seconds = traces, annotated, folded, cluster, seconds
        self.limit, self.joints = WorkLimit(ALL_MESHES * seconds), GroupStrategyCache()
        self.refusal: Infeasible | None = None

    def all(self, meshes: Iterable[tuple[int, dict[str, int]]]) -> list[tuple[int, StageCost]]:
        """Costs on these numbers of stages and meshes of a stage. Where the time for placements is over, they follow from those
        of a mesh with the same tensor axis on all devices."""
        found, of_tensor = list[tuple[int, StageCost]](), dict[int, StageCost]()
        for stages, mesh in meshes:
            known = of_tensor.get(mesh.get(TENSOR_AXIS, 1))
            late = known is not None and self.limit.is_over
            cost = known.on(mesh) if known is not None and late else self._cost(stages, mesh)
            if cost is not None:
                of_tensor.setdefault(cost.tensor, cost)
                found.append((stages, cost))
        return found

    def least(self, costs: list[tuple[int, StageCost]]) -> LeastWork:
        """The least over all meshes."""
        folded = self.folded
        each = [(cost.compute_us / stages, cost.layers_us / stages, cost.forward_share) for stages, cost in costs]
        us, layers_us, share = (min(column) for column in zip(*each)) if each else (0.0, 0.0, 0.0)
        return LeastWork(us, layers_us, share, 0 if folded is None or len(folded.lists) > 1 else folded.layers)

    def _cost(self, stages: int, mesh: dict[str, int]) -> StageCost | None:
        """Placements of the whole batch on the ranks of a stage; None where their parameters alone do not fit, or where a few
        layers do not represent the model. Unsharded parameters may stay in memory, as under a memory budget."""
        options, folded = self.traces.options, self.folded
        cluster, budget = cluster_of_stage(self.cluster, stages), stages * memory_limit(options, self.cluster)
        own = options.model_copy(update={"mesh": mesh or None, "memory_budget": budget, "microbatches": 1, "recompute": {},
                                         "schedule": "auto", "virtual_stages": 1})
        try:
            planned = plan_graph(self.annotated, own, cluster, lifetimes=MemoryModel(0.0), budget_bytes=budget,
                                 memos=SearchTables(joints=self.joints),
                                 allowance=self.limit.part(LATER * self.seconds), quick=self.traces.quick,
                                 shorter=None if folded is None else folded.shorter,
                                 further=0 if folded is None else folded.further)
        except Infeasible as error:
            self.refusal = self.refusal or error
            return None
        except DepthsDiffer:
            return None
        record, trained = planned.record, sum(self.traces.trained.values())
        largest = max((nbytes for each in record.operations.values() for nbytes in each.result_bytes), default=0)
        step = step_graph(record, PlannedPrices(record))
        layers_us, forward_us = _layers_us(step, () if folded is None else folded.lists)
        return StageCost(
            mesh, record.predicted.step_time_us, record.solver.bound or 0.0,
            (2 + options.resident_states) * trained / cluster.world_size, float(record.memory.activations), float(largest),
            self._output_bytes() / math.prod(mesh.values()), _parameter_us(step, record.parameters),
            record.predicted.compute_us, trained, layers_us, forward_us / layers_us if layers_us else 0.0)

    def _output_bytes(self) -> float:
        graph = self.annotated.graph
        return float(sum(graph.values[graph.outputs[each.number][0]].bytes for each in self.annotated.interface.unread))


def _parameter_us(step: StepGraph, parameters: Collection[str]) -> float:
    """Time of communication of parameters and their gradients."""
    return sum(leg.multiplicity * hop.us for leg in step.legs if leg.gradient or leg.value in parameters for hop in leg.hops)


def _layers_us(step: StepGraph, lists: Sequence[str]) -> tuple[float, float]:
    """Computation of all repeated layers, and of their forward."""
    calls = [call for call in step.calls if any(call.block.startswith(f"{path}.") for path in lists)]
    return sum(call.runs * call.us for call in calls), sum(call.runs * call.us for call in calls if call.phase == FORWARD)
