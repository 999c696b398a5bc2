"""Describe a plan for people: one source for tables, pictures, texts and pages."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.peak_memory import fullest_moment, stage_moments
from hpml_compiler.plans.pipeline_records import LossChunksPlan, PipelinePlan, StagePlan
from hpml_compiler.plans.schema import ROOT, GraphPlan
from hpml_compiler.plans.unsplit_graph import why_not_split
from hpml_compiler.visualize.description.module_classes import block_path, module_classes
from hpml_compiler.visualize.description.module_summaries import axis_totals, edge_summaries, module_summary, scaled
from hpml_compiler.visualize.description.peak_places import describe_moment, memory_limit
from hpml_compiler.visualize.description.placement_words import uses_of, value_words
from hpml_compiler.visualize.description.records import (
    COMMUNICATION,
    COMPUTE,
    OPTIMIZER,
    OVERHEAD,
    RECOMPUTE,
    WAITING,
    AxisSummary,
    CommunicationSummary,
    MessageSummary,
    ModuleSummary,
    OutputSummary,
    PlanDescription,
    StageSummary,
    StepSummary,
)
from hpml_compiler.visualize.description.saved_values import saved_bytes
from passes.graph.decision import LossChunking
from passes.hardware.gradient_compression import describe_compression

PP_AXIS = "pp"


def describe(plan: PlanContent) -> PlanDescription:
    steps = tuple(map(describe_step, plan.step_graphs))
    memory = dict(plan.peak.parts) if plan.peak is not None else {}
    limit, name = memory_limit(plan)
    return PlanDescription(
        devices=plan.world_size, cluster=plan.cluster or "", torch_version=plan.torch_version, mesh=dict(plan.mesh),
        step_us=plan.predicted.step_time_us, axes=_axes(plan, steps), memory=memory, peak_bytes=plan.memory.peak,
        limit_bytes=limit, limit_name=name, steps=steps,
        rejected=tuple(each.model_dump(mode="json") for each in plan.rejected),
        unplanned=tuple(each.model_dump(mode="json") for each in plan.unplanned), seconds=plan.seconds,
        options=dict(plan.options))


def describe_step(graph: GraphPlan) -> StepSummary:
    cost, pipe = graph.predicted, graph.pipeline
    classes = module_classes(graph)
    uses = uses_of(graph)
    saved_by = saved_bytes(graph)
    modules = [module_summary(graph, each, uses, saved_by) for each in classes]
    stages = () if pipe is None else _stages(graph, pipe)
    if pipe is None:
        parts = {COMPUTE: cost.compute_us, COMMUNICATION: cost.communication_us, RECOMPUTE: cost.again_us,
                 OPTIMIZER: cost.optimizer_us, OVERHEAD: cost.overhead_us}
        modules = scaled(modules, cost.compute_us, cost.communication_us)
    else:
        names = dict.fromkeys(part for stage in stages for part in stage.parts)
        parts = {part: sum(stage.parts.get(part, 0.0) for stage in stages) / pipe.ranks for part in names}
        modules = [module for stage in stages for module in scaled(
            [each for each in modules if each.stage == stage.number], stage.parts[COMPUTE], stage.parts[COMMUNICATION])]
    times = graph.microbatches
    return StepSummary(
        name=graph.name, training=graph.training, step_us=cost.step_time_us,
        parts={part: us for part, us in parts.items() if us}, communication_us=cost.communication_us,
        status=graph.solver.status, bound=graph.solver.bound, gap=graph.solver.gap, objective=graph.solver.objective,
        memory=dict(graph.at_peak.parts) if graph.at_peak else {}, at=describe_moment(graph.at_peak) if graph.at_peak else "",
        microbatches=pipe.microbatches if pipe else times.count if times else 1, schedule=pipe.schedule if pipe else "",
        bubble=pipe.bubble if pipe else 0.0, modules=tuple(modules), stages=stages,
        edges=tuple(edge_summaries(graph, classes, {} if graph.kept else saved_by)),
        replicated={each.name: each.reason for each in graph.left_whole}, not_split=why_not_split(graph),
        loss=loss_words(graph.loss_chunks), outputs=tuple(_outputs(graph)))


def _outputs(graph: GraphPlan) -> Iterator[OutputSummary]:
    for name, placements in graph.outputs.items():
        operation = graph.operations.get(name)
        if operation is not None:
            dims = operation.dims[0] if operation.dims else ""
            yield OutputSummary(name, block_path(operation.block) or ROOT, dims, value_words(placements, dims, graph.mesh),
                                sum(operation.result_bytes[:1]))


def _axes(plan: PlanContent, steps: Sequence[StepSummary]) -> tuple[AxisSummary, ...]:
    modules = [module for step in steps for module in step.modules]
    totals = axis_totals(module.communication for module in modules)
    nothing, found = CommunicationSummary(0.0, 0.0, 0.0, {}), []
    for axis, size in plan.mesh.items():
        words: Counter[str] = Counter()
        for module in modules:
            words.update({word: module.count for word in module.sharding.get(axis, ())})
        splits = tuple(word for word, _ in words.most_common())
        if axis == PP_AXIS and any(step.stages for step in steps):
            splits = ("stages",)
        sent = {hop.compression for graph in plan.step_graphs for move in graph.redistributions for hop in move.hops
                if hop.axis == axis}
        rows = next((graph.rows_by_rank[axis] for graph in plan.step_graphs if axis in graph.rows_by_rank), ())
        splits = (*map(describe_compression, sorted(sent - {""})), *([f"rows {_in_runs(rows)}"] if rows else []), *splits)
        found.append(AxisSummary(axis, size, plan.links.get(axis, ""), splits, totals.get(axis, nothing)))
    return tuple(found)


def _in_runs(rows: Sequence[int]) -> str:
    """Numbers of rows by coordinate: 5+3, or 4x6+4x2 for more than a few."""
    if len(rows) <= 8:
        return "+".join(map(str, rows))
    return "+".join(f"{len([*same])}x{count}" for count, same in groupby(rows))


def _stages(graph: GraphPlan, pipe: PipelinePlan) -> tuple[StageSummary, ...]:
    step_us, busy = graph.predicted.step_time_us, [_busy(stage, pipe.microbatches) for stage in pipe.stages]
    worked = [0.0] * pipe.ranks
    for stage, parts in zip(pipe.stages, busy):
        worked[stage.rank] += sum(parts.values())
    waiting = [max(0.0, step_us - us) for us in worked]
    memory, last = _memory_of_ranks(graph, pipe), {stage.rank: k for k, stage in enumerate(pipe.stages)}
    return tuple(StageSummary(
        number=k, rank=stage.rank, devices=devices_of(graph.mesh, stage.rank), forward_us=stage.forward_us,
        backward_us=stage.backward_us, parts={**parts, WAITING: waiting[stage.rank] if last[stage.rank] == k else 0.0},
        memory=memory[stage.rank], in_flight=stage.in_flight,
        sends=tuple(MessageSummary(each.value, _dims(graph, each.value), each.bytes, each.backward) for each in stage.sends))
        for k, (stage, parts) in enumerate(zip(pipe.stages, busy)))


def _dims(graph: GraphPlan, value: str) -> str:
    operation = graph.operations.get(value)
    return operation.dims[0] if operation is not None and operation.dims else ""


def _busy(stage: StagePlan, microbatches: int) -> dict[str, float]:
    """Parts of a step in which a stage works, as the schedule was simulated; in plans without them, by its microbatches."""
    if stage.parts:
        return {part: stage.parts.get(key, 0.0) for part, key in (
            (COMPUTE, "compute"), (COMMUNICATION, "communication"), (RECOMPUTE, "recompute"), (OPTIMIZER, "optimizer"))}
    work = microbatches * (stage.forward_us + stage.backward_us) - stage.again_us
    return {COMPUTE: work, COMMUNICATION: 0.0, RECOMPUTE: stage.again_us, OPTIMIZER: 0.0}


def loss_words(chunks: LossChunksPlan | LossChunking | None) -> str:
    if chunks is None:
        return ""
    return f"at once: {chunks.reason}" if chunks.count == 1 else f"in {chunks.count} chunks of rows, from {chunks.head} on"


def devices_of(mesh: dict[str, int], rank: int) -> str:
    """The devices with this coordinate on the axis pp."""
    each = 1
    for axis, size in mesh.items():
        each *= 1 if axis == PP_AXIS else size
    if next(iter(mesh)) != PP_AXIS:
        return f"devices with pp = {rank}"
    return f"device {rank}" if each == 1 else f"devices {rank * each}-{(rank + 1) * each - 1}"


def _memory_of_ranks(graph: GraphPlan, pipe: PipelinePlan) -> list[dict[str, int]]:
    """Bytes by part at the peak of each rank. A rank's state is in proportion to that of the fullest."""
    memory = graph.memory
    state = memory.parameters + memory.gradients + memory.optimizer
    held = [sum(stage.resident_bytes for stage in pipe.stages if stage.rank == rank) for rank in range(pipe.ranks)]
    found: list[Peak] = []
    for rank in range(pipe.ranks):
        kept = [stage.kept for stage in pipe.stages if stage.rank == rank and stage.kept is not None]
        share = held[rank] / state if state else 0.0
        resident = {"parameters": round(memory.parameters * share), "optimizer": round(memory.optimizer * share)}
        if not kept:
            found.append(Peak(parts={**resident, "gradients": round(memory.gradients * share), "saved": sum(
                stage.saved_bytes * stage.in_flight for stage in pipe.stages if stage.rank == rank)}))
            continue
        stages, optimizer = stage_moments(graph, kept, resident)
        found.append(fullest_moment([*(moment for pair in stages for moment in pair), optimizer]))
    if graph.at_peak is not None and found:
        fullest = max(range(len(found)), key=lambda rank: found[rank].bytes)
        found[fullest] = graph.at_peak
    return [dict(each.parts) for each in found]


def modules_of(step: StepSummary, stage: int | None) -> list[ModuleSummary]:
    return [each for each in step.modules if each.stage == stage]
