"""Predicted time and memory of a microbatched step, and its record in the plan."""
from __future__ import annotations

from collections.abc import Iterator

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.plans.schema import GraphPlan, MemoryBytes, PredictedCost
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import Mesh, mesh_from_pin
from passes.op_rules.base import REPLICATE, format_placement
from passes.sharding.microbatch_axis import AFTER, MicrobatchPlacement
from passes.simulation.step_graph import StepGraph

WHOLE, SUM = format_placement(REPLICATE), "P"


def with_microbatches(record: GraphPlan, graph: PlacementGraph, times: MicrobatchPlacement, loss_inside: bool, mesh: Mesh,
                      states: int,
                      ) -> GraphPlan:
    """Convert the plan of a full batch to microbatches. mesh, states: for the costs of fewer rows."""
    said = microbatch_plan(record, graph, times, loss_inside)
    record = record.model_copy(update={"microbatches": said})
    prices = PlannedPrices(record, RepricedPlan(record, MeshPrices(mesh, states)))
    step = step_graph(record, prices)
    return record.model_copy(update={
        "solver": record.solver.of_another(), "predicted": _predicted(record, step, said.count),
        "memory": _memory(record, step)})


def in_time(record: GraphPlan, annotated: AnalyzedGraph, times: MicrobatchPlacement | None, cluster: Cluster,
            options: Options) -> GraphPlan:
    """Convert the plan where the graph has microbatches: times is None where it does not."""
    if times is None:
        return record
    return with_microbatches(record, annotated.graph, times, loss_of(annotated.gm) is not None,
                             mesh_from_pin(record.mesh, cluster), options.optimizer_states)


def microbatch_plan(record: GraphPlan, graph: PlacementGraph, times: MicrobatchPlacement, loss_inside: bool) -> MicrobatchPlan:
    before, after, sums = [], [], []
    for op in graph.operations:
        if op.name not in record.operations:
            continue
        labels = {*times.reads[op.index], *times.makes[op.index]}
        if labels <= {WHOLE}:
            before.append(op.name)
        elif AFTER in labels:
            after.append(op.name)
        elif SUM in times.makes[op.index]:
            sums.append(op.name)
    return MicrobatchPlan(count=times.microbatches, share=times.share, before=tuple(before), after=tuple(after),
                          sums=tuple(sums), whole=times.whole, loss_inside=loss_inside)


def _predicted(record: GraphPlan, step: StepGraph, count: int) -> PredictedCost:
    """Sums over all parts, as in the plan of a full batch."""
    compute = sum(call.us * call.runs * (count if call.when == "loop" else 1) for call in step.calls)
    compute += (count - 1) * step.accumulate_us
    communication = sum(hop.us * leg.multiplicity * (1 if leg.once or leg.gradient else count)
                        for leg in step.legs for hop in leg.hops)
    overhead = count * record.predicted.overhead_us
    return record.predicted.model_copy(update={
        "compute_us": compute, "communication_us": communication, "overhead_us": overhead, "energy_j": None,
        "energy_label": None, "step_time_us": compute + communication + overhead + record.predicted.optimizer_us})


def _memory(record: GraphPlan, step: StepGraph) -> MemoryBytes:
    """Activations are those saved at the same time."""
    held = sum(_saved(step, 1 if step.at_once else step.microbatches))
    return record.memory.model_copy(update={"activations": round(held)})


def _saved(step: StepGraph, times: int) -> Iterator[float]:
    for call in step.calls:
        yield call.saved_bytes * call.runs * (times if call.when == "loop" else 1)
