"""Predicted time and memory of a microbatched step, and its record in the plan."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.plans.schema import GraphPlan, MemoryBytes, ParameterPlan, PredictedCost
from hpml_compiler.simulate.local_sizes import values_of_parameters
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.simulate.simulation import ESTIMATED
from hpml_compiler.simulate.step_energy import Activity
from passes.cost_model.energy_model import capped_cluster
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import AFTER, MicrobatchPlacement
from passes.graph.placement_graph import PlacementGraph, block_class
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import Mesh, mesh_from_pin
from passes.json_records import FrozenMap
from passes.sharding.loop_gathers import ONCE, SUM, WHOLE, LoopGathers, reduced_in_loop
from passes.simulation.step_graph import StepGraph

NO_NAMES: FrozenMap[str, str] = FrozenMap({})


def with_microbatches(record: GraphPlan, graph: PlacementGraph, times: MicrobatchPlacement, loss_inside: bool, mesh: Mesh,
                      states: int, repeats: LoopGathers = ONCE, names: Mapping[str, str] = NO_NAMES,
                      ) -> GraphPlan:
    """Convert the plan of a full batch to microbatches. mesh, states: for the costs of fewer rows. repeats: collectives of
    parameters that each microbatch runs; names: of the parameters in the plan."""
    said = microbatch_plan(record, graph, reduced_in_loop(graph, times, repeats)[0], loss_inside)
    said = _with_repeats(record, said, repeats, names)
    record = record.model_copy(update={"microbatches": said})
    prices = PlannedPrices(record, RepricedPlan(record, MeshPrices(mesh, states)))
    step = step_graph(record, prices)
    return record.model_copy(update={
        "solver": record.solver.of_another(), "predicted": _predicted(record, step, said.count, mesh),
        "memory": _memory(record, step)})


def in_time(record: GraphPlan, annotated: AnalyzedGraph, times: MicrobatchPlacement | None, cluster: Cluster,
            options: Options, repeats: LoopGathers = ONCE) -> GraphPlan:
    """Convert the plan where the graph has microbatches: times is None where it does not. repeats: as for
    `with_microbatches`."""
    if times is None:
        return record
    return with_microbatches(record, annotated.graph, times, loss_of(annotated.gm) is not None,
                             mesh_from_pin(record.mesh, capped_cluster(cluster, options.power_cap)), options.optimizer_states,
                             repeats, annotated.interface.names)


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


def _with_repeats(record: GraphPlan, said: MicrobatchPlan, repeats: LoopGathers, names: Mapping[str, str]) -> MicrobatchPlan:
    """The split where each microbatch gathers some parameters and computes again what depends on them."""
    gathered, reduced = (_of_all_layers(record, {names[name] for name in part if name in names}, set(names.values()))
                         for part in (repeats.gathered, repeats.reduced))
    values = values_of_parameters(record, gathered)
    moved = {move.consumer for move in record.redistributions if move.value in values and any(hop.bytes for hop in move.hops)}
    before = set(said.before)
    for name, operation in record.operations.items():
        if name in before and not moved.isdisjoint(operation.sources):
            moved.add(name)
    repeated = tuple(name for name in said.before if name in moved)
    return said.model_copy(update={"before": tuple(name for name in said.before if name not in moved), "repeated": repeated,
                                   "gathered": gathered, "reduced": reduced})


def _of_all_layers(record: GraphPlan, names: Collection[str], traced: Collection[str]) -> tuple[str, ...]:
    """These parameters, and those of layers that were not traced which are like them."""
    alike = {likeness(name, record.parameters[name]) for name in names if name in record.parameters}
    return tuple(name for name, own in record.parameters.items()
                 if name in names or name not in traced and likeness(name, own) in alike)


def likeness(name: str, parameter: ParameterPlan) -> tuple[object, ...]:
    """Equal for parameters of equal layers that are stored alike."""
    return block_class(name), parameter.shape, parameter.dtype, parameter.placements, parameter.held


def _predicted(record: GraphPlan, step: StepGraph, count: int, mesh: Mesh) -> PredictedCost:
    """Sums over all parts, as in the plan of a full batch."""
    calls = [(call.runs * (count if call.when == "loop" else 1), call) for call in step.calls]
    hops = [(leg.multiplicity * leg.runs(count), hop) for leg in step.legs for hop in leg.hops]
    adding, overhead = (count - 1) * step.accumulate_us, count * record.predicted.overhead_us
    compute, communication = sum(runs * call.us for runs, call in calls) + adding, sum(runs * hop.us for runs, hop in hops)
    optimizer = record.predicted.optimizer_us
    total = compute + communication + overhead + optimizer
    work = Activity.of_runs(calls, hops).beside(Activity({"pointwise": adding + optimizer}))
    return record.predicted.model_copy(update={
        "compute_us": compute, "communication_us": communication, "overhead_us": overhead, "step_time_us": total,
        "energy_j": work.step_j(total, mesh), "energy_label": ESTIMATED})


def _memory(record: GraphPlan, step: StepGraph) -> MemoryBytes:
    """Activations are those saved at the same time."""
    held = sum(_saved(step, 1 if step.at_once else step.microbatches))
    return record.memory.model_copy(update={"activations": round(held)})


def _saved(step: StepGraph, times: int) -> Iterator[float]:
    for call in step.calls:
        yield call.saved_bytes * call.runs * (times if call.when == "loop" else 1)
