"""Predicted times, memory and sends of pipeline stages, and of the step, for the plan."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpml_compiler.planner.graph.memory_budget import GraphMemory
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, over_all_axes
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.peak_memory import peak_of_stages
from hpml_compiler.plans.pipeline_records import PipelinePlan, SentPlan, StagePlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.scheduled_stages import StageTimes, sends_us, stages_of, times_of_stages
from hpml_compiler.simulate.simulation import ESTIMATED
from hpml_compiler.simulate.step_energy import above_idle_j
from passes.cost_model.energy_model import Power
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import Mesh, mesh_from_pin
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.pipeline_timeline import TimedStage, pipeline_tasks, simulate_pipeline
from passes.simulation.event_simulator import simulate_tasks
from passes.simulation.step_timeline import breakdown


@dataclass(frozen=True)
class StagePart:
    """Contents of one stage. operations: how often it runs each operation of the record. reads: its parameters, and whether it
    sums their gradients. saved_bytes: for one microbatch; sends: to the next stage's rank, then back to that of the previous
    stage, for one microbatch. in_flight: most microbatches that have saved values at a time. kept: see `StagePlan`.
    weight_share: share of backward that runs later, where the schedule splits it in two."""

    blocks: tuple[str, ...]
    operations: Mapping[str, int]
    reads: Mapping[str, bool]
    saved_bytes: int
    sends: tuple[SentPlan, ...]
    in_flight: int
    kept: CheckpointingPlan
    weight_share: float | None = None


def with_pipeline(record: GraphPlan, parts: Sequence[StagePart], table: PipelineSchedule, mesh: Mapping[str, int],
                  cluster: Cluster, states: int, memory: Sequence[GraphMemory]) -> GraphPlan:
    """Add the pipeline to a plan. record: the full graph on the ranks of one stage. mesh: of all ranks. states: of the
    optimizer. memory: of each rank besides saved activations."""
    record = over_all_axes(record, mesh)
    # The solved problem places the full graph on the ranks of one stage.
    record = record.model_copy(update={"solver": record.solver.of_another()})
    mesh_prices = MeshPrices(mesh_from_pin(mesh, cluster), states)
    prices = PlannedPrices(record, RepricedPlan(record, mesh_prices))
    times = times_of_stages(record, [part.operations for part in parts], prices)
    stages = tuple(_stage(k, record, parts, table, times[k]) for k in range(len(parts)))
    pipe = PipelinePlan(schedule=table.name, ranks=mesh[PP_AXIS], microbatches=table.microbatches, step_us=0.0, bubble=0.0,
                        stages=stages)
    pipe = pipe.model_copy(update={"stages": tuple(
        stage.model_copy(update={"send_us": on, "return_us": back})
        for stage, (on, back) in zip(stages, sends_us(pipe, mesh_prices), strict=True))})
    record = _with_memory(record, pipe, memory)
    prices = PlannedPrices(record, RepricedPlan(record, mesh_prices))
    known = stages_of(pipe, times, None, prices.optimizer_us(), prices.accumulate_us())
    played = simulate_pipeline(table, known)
    pipe = pipe.model_copy(update={"step_us": played.step_us, "bubble": played.bubble})
    above_j = above_idle_j(pipe, [each.loop for each in times], [each.once for each in times], known, prices.accumulate_us(),
                           mesh_prices.mesh, PP_AXIS)
    return _with_times(record.model_copy(update={"pipeline": pipe}), known, above_j, mesh_prices.mesh)


def _stage(k: int, record: GraphPlan, parts: Sequence[StagePart], table: PipelineSchedule, times: StageTimes) -> StagePlan:
    part = parts[k]
    # Parameters that an earlier stage of its rank reads, too, are in memory once.
    held = {name for name in part.reads
            if not any(name in parts[j].reads for j in range(k) if table.ranks[j] == table.ranks[k])}
    parameters = tuple(name for name, makes in part.reads.items() if makes)
    backward_us = times.backward_us + (part.kept.again_us + part.kept.offload_us) / table.microbatches
    return StagePlan(
        blocks=part.blocks, rank=table.ranks[k], operations={name: n for name, n in part.operations.items() if n},
        parameters=parameters, parameter_bytes=sum(record.parameters[name].bytes_whole for name in parameters),
        forward_us=times.forward_us, backward_us=backward_us,
        weight_us=None if part.weight_share is None else backward_us * part.weight_share,
        send_us=0.0, return_us=0.0, saved_bytes=part.saved_bytes, in_flight=part.in_flight,
        resident_bytes=sum(resident_bytes(record, held)), sends=part.sends, kept=part.kept)


def resident_memory(record: GraphPlan, names: Collection[str]) -> GraphMemory:
    """Memory of a rank that has these parameters, besides saved activations."""
    parameters, gradients, optimizer = resident_bytes(record, names)
    sizes = [record.parameters[name].bytes_per_device for name in names if record.parameters[name].trainable]
    share = parameters / record.memory.parameters if record.memory.parameters else 0.0
    return GraphMemory(record.name, parameters, gradients, optimizer, max(sizes, default=0),
                       copies=share * record.memory.copies)


def resident_bytes(record: GraphPlan, names: Collection[str]) -> tuple[int, int, int]:
    """Bytes of these parameters and, for the trainable ones, of their gradients and optimizer state: their shares of all."""
    memory, parameters = record.memory, record.parameters

    def share(trainable: bool) -> float:
        counted = {name: each.bytes_per_device for name, each in parameters.items() if each.trainable or not trainable}
        total = sum(counted.values())
        return sum(counted.get(name, 0) for name in names) / total if total else 0.0

    trained = share(True)
    return round(memory.parameters * share(False)), round(memory.gradients * trained), round(memory.optimizer * trained)


def _with_memory(record: GraphPlan, pipe: PipelinePlan, memory: Sequence[GraphMemory]) -> GraphPlan:
    """The plan with the memory of the rank that holds most besides saved activations, in proportion to which the optimizer's
    time shrinks; and with the peak of the rank that has the highest, as its stages' storage programs count it."""
    most = max(memory, key=lambda own: own.state + own.gradients)
    share = most.parameters / record.memory.parameters if record.memory.parameters else 0.0
    activations = max(sum(stage.saved_bytes * stage.in_flight for stage in pipe.stages if stage.rank == rank)
                      for rank in range(pipe.ranks))
    fullest = max(peaks_of_ranks(record, pipe, memory), key=lambda peak: peak.bytes)
    again_us = sum(stage.again_us for stage in pipe.stages) / pipe.ranks
    return record.model_copy(update={
        "predicted": record.predicted.model_copy(update={
            "optimizer_us": record.predicted.optimizer_us * share, "again_us": again_us}),
        "memory": record.memory.model_copy(update={
            "parameters": round(most.parameters), "gradients": round(most.gradients), "optimizer": round(most.optimizer),
            "copies": round(most.copies), "activations": activations, "peak": fullest.bytes}),
        "at_peak": fullest})


def peaks_of_ranks(record: GraphPlan, pipe: PipelinePlan, memory: Sequence[GraphMemory]) -> list[Peak]:
    """The memory peak of each rank. memory: see `with_pipeline`."""
    return [peak_of_stages(record, [stage.kept for stage in pipe.stages if stage.rank == rank and stage.kept is not None],
                           {"parameters": round(own.parameters), "optimizer": round(own.optimizer),
                            "copies": round(own.copies)})
            for rank, own in enumerate(memory)]


def _with_times(record: GraphPlan, stages: Sequence[TimedStage], above_j: float, mesh: Mesh) -> GraphPlan:
    """Compute and communication are averages over ranks. above_j: joules besides those of idle devices."""
    pipe = record.pipeline
    assert pipe is not None, "it was put there"
    built = pipeline_tasks(stages, pipe.microbatches, pipe.schedule, pipe.ranks)
    spans = simulate_tasks(built.tasks, [1.0] * pipe.ranks)
    parts = breakdown(built.tasks, built.labels, spans, [1] * pipe.ranks)
    own = tuple(stage.model_copy(update={"parts": _parts(timed, pipe.microbatches, stage.again_us)})
                for stage, timed in zip(pipe.stages, stages, strict=True))
    pipe = pipe.model_copy(update={"stages": own})
    return record.model_copy(update={"pipeline": pipe, "predicted": record.predicted.model_copy(update={
        "step_time_us": spans.end_us, "compute_us": parts.compute_us, "communication_us": parts.communication_us,
        "overhead_us": 0.0, "energy_j": above_j + mesh.size * Power.of(mesh.device).idle_w * spans.end_us * 1e-6,
        "energy_label": ESTIMATED})})


def _parts(stage: TimedStage, microbatches: int, again_us: float) -> dict[str, float]:
    """See `StagePlan.parts`: all microbatches, and what is done once in a step."""
    exposed_us = microbatches * (stage.forward_inside.exposed_us + stage.backward_inside.exposed_us)
    work_us = microbatches * (stage.forward_us + stage.backward_us) + stage.around_us
    return {"compute": max(work_us - exposed_us - again_us, 0.0), "communication": exposed_us + stage.reduce_us,
            "recompute": again_us, "optimizer": stage.optimizer_us}
