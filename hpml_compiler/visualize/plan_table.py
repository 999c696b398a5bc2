"""A plan as a table, from its description: a row per class of equal modules, stages, axes, memory and what was rejected."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.plans.schema import GraphPlan, MemoryBytes, ParameterPlan, SolverReport
from hpml_compiler.visualize.description.copies_memory import copy_bytes, low_rank_bytes
from hpml_compiler.visualize.description.describe_plan import describe
from hpml_compiler.visualize.description.records import (
    WAITING,
    ModuleSummary,
    PlanDescription,
    StageSummary,
    StepSummary,
)
from hpml_compiler.visualize.formatting import (
    format_bytes,
    format_collectives,
    format_count,
    format_joules,
    format_mesh,
    format_objective,
    format_place,
    format_us,
    shorten,
)
from hpml_compiler.visualize.terminal import as_text, columns, labelled
from passes.graph.placement_graph import block_class

MOST_ROWS = 40
MOST_WORDS = MOST_NAMES = 3  # for one axis of a module; of replicated nodes, and of other meshes
NARROW, WIDE, WIDEST = 78, 110, 170
"""Columns below which a table of stages leaves out runs and weights; from which it shows communication by axis, and all that it
knows."""


def render_text(plan: PlanContent, width: int | None = None) -> str:
    """The table as plain text of at most `width` columns (default: the terminal's)."""
    return as_text(renderable(plan), width)


def renderable(plan: PlanContent) -> RenderableType:
    """The table for a rich console."""
    return PlanTable(plan)


def stages_text(plan: PlanContent) -> str:
    """The tables of the pipeline stages as plain text; "" without a pipeline."""
    found = describe(plan)
    return "\n".join(as_text(_stages(step, found, columns())) for step in found.steps if step.stages)


class PlanTable:
    """The table of a plan, with as many columns as fit."""

    def __init__(self, plan: PlanContent):
        self.plan, self.found = plan, describe(plan)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*_lines(self.plan, self.found, options.max_width))


def _lines(plan: PlanContent, found: PlanDescription, width: int) -> Iterator[RenderableType]:
    yield Text(f"{format_place(found.mesh, found.devices, found.cluster)}, torch {found.torch_version}")
    for step, graph in zip(found.steps, plan.step_graphs, strict=True):
        yield Text("")
        yield from _step(step, graph, found, width)
    for part in plan.unplanned:
        place = f" ({part.where})" if part.where else ""
        yield labelled("not planned" if part.used else "not used",
                       f"{len(part.parameters)} parameters, {part.elements:,} elements: {part.reason}{place}")
    if found.axes:
        yield _axes(found)
    if len(plan.step_graphs) > 1:
        yield labelled("per device", describe_memory(plan.memory, plan.peak) + _of_limit(found))
    if copies := copy_bytes(plan):
        place = "included" if plan.memory.copies else "besides"
        yield labelled("copies", f"{format_bytes(copies)} of host memory per rank {place}, for `redundancy`")
    if errors := low_rank_bytes(plan):
        yield labelled("PowerSGD", f"at most {format_bytes(errors)} per device besides, for errors and bases")
    for attempt in plan.rejected[:MOST_NAMES]:
        cost = "" if attempt.cost is None else f"{format_objective(attempt.cost, attempt.objective)}, "
        yield labelled("rejected", f"mesh {format_mesh(attempt.mesh)}: {cost}{attempt.reason}")
    if len(plan.rejected) > MOST_NAMES:
        yield labelled("", f"and {len(plan.rejected) - MOST_NAMES} more meshes")
    if plan.seconds:
        took = ", ".join(f"{phase} {format_us(1e6 * seconds)}" for phase, seconds in plan.seconds.items())
        yield labelled("took", took)


def _step(step: StepSummary, graph: GraphPlan, found: PlanDescription, width: int) -> Iterator[RenderableType]:
    cost = graph.predicted
    yield Text(f"{step.name} ({'training' if step.training else 'inference'}): {format_us(step.step_us)} a step "
               f"predicted ({describe_solver(graph.solver)})")
    yield Text(", ".join(f"{part} {format_us(us)}" for part, us in step.parts.items()))
    if cost.energy_j is not None:
        yield Text(describe_energy(cost.energy_j, step.step_us, math.prod(graph.mesh.values()), cost.energy_label))
    if step.stages:
        yield _stages(step, found, width)
    yield _modules(step, width)
    yield from _disagreements(graph, step)
    for half, report in graph.blocks.items():
        yield labelled(half, f"{report.compiled} of {report.calls} calls compiled, in {report.segments} segments of which "
                             f"{report.different} are distinct")
    if graph.microbatches is not None:
        yield labelled("microbatches", describe_microbatches(graph.microbatches, graph.parameters))
    if step.loss and (graph.loss_chunks is None or graph.loss_chunks.count > 1 or "loss_chunks" in found.options):
        yield labelled("loss", step.loss)
    for each in step.outputs:
        yield labelled("returns", str(each))
    one = len(found.steps) == 1
    yield labelled("per device", describe_memory(graph.memory, graph.at_peak) + (_of_limit(found) if one else ""))
    yield labelled("collectives", format_collectives(graph.collectives) or "none")
    if step.not_split:
        yield labelled("not split", step.not_split.partition("; ")[2])
    for name, reason in list(step.replicated.items())[:MOST_NAMES]:
        yield labelled("replicated", f"{name}: {reason}")
    if len(step.replicated) > MOST_NAMES:
        yield labelled("", f"and {len(step.replicated) - MOST_NAMES} more")


def _modules(step: StepSummary, width: int) -> Table:
    shown = _costliest(step.modules)
    axes = [axis for axis in dict.fromkeys(axis for each in step.modules for axis in each.communication)]
    by_axis = width >= WIDE and len(axes) > 1
    table = Table(box=box.SIMPLE, pad_edge=False)
    if step.stages:
        table.add_column("stage", justify="right", no_wrap=True)
    narrow = bool(step.stages) and width < NARROW
    table.add_column("module", no_wrap=True)
    if not narrow:
        table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("sharding", overflow="fold", ratio=1, min_width=12)
    table.add_column("compute", justify="right", no_wrap=True)
    for axis in axes if by_axis else ("",):
        table.add_column(f"over {axis}" if axis else "sent", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("saved", justify="right", no_wrap=True)
    if width >= WIDEST:
        table.add_column("parameters", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("weights", justify="right", no_wrap=True)
    longest = max(width // 4, 18) if width >= WIDE or not step.stages else width // 5
    for each in shown:
        sent = [_us(each.communication[axis].us if axis in each.communication else 0.0) for axis in axes] if by_axis else [
            _us(each.communication_us)]
        table.add_row(*map(Text, (
            *([str(each.stage)] if step.stages else []), shorten(each.name, longest), *([] if narrow else [f"x{each.count}"]),
            sharding_text(each.sharding, MOST_WORDS if width < WIDE else 6), _us(each.compute_us), *sent,
            *([_bytes(each.saved_bytes)] if width >= WIDE else []),
            *([format_count(each.parameter_count) if each.parameter_count else ""] if width >= WIDEST else []),
            *([] if narrow else [_bytes(each.parameter_bytes)]))))
    if len(shown) < len(step.modules):
        rest = [each for each in step.modules if each not in shown]
        table.add_row(*map(Text, (
            *([""] if step.stages else []), f"{len(rest)} cheaper modules", *([] if narrow else [""]), "",
            _us(sum(each.compute_us for each in rest)),
            *([""] * len(axes) if by_axis else [_us(sum(each.communication_us for each in rest))]),
            *([_bytes(sum(each.saved_bytes for each in rest))] if width >= WIDE else []),
            *([""] if width >= WIDEST else []), *([] if narrow else [_bytes(sum(each.parameter_bytes for each in rest))]))))
    return table


def sharding_text(sharding: Mapping[str, Sequence[str]], most: int = MOST_WORDS) -> str:
    """Words by axis, such as "dp: batch; tp: columns, rows"; axes with the same words together."""
    axes: dict[tuple[str, ...], list[str]] = {}
    for axis, words in sharding.items():
        axes.setdefault(tuple(words), []).append(axis)
    return "; ".join(f"{' and '.join(own)}: {', '.join(words[:most])}" + f" +{len(words) - most}" * (len(words) > most)
                     for words, own in axes.items()) or "whole"


def _us(us: float) -> str:
    return format_us(us) if us else ""


def _bytes(nbytes: float) -> str:
    return format_bytes(nbytes) if nbytes else ""


def _costliest(modules: Sequence[ModuleSummary]) -> Sequence[ModuleSummary]:
    """At most MOST_ROWS modules, those with the most time and then the most bytes, in their order."""
    if len(modules) <= MOST_ROWS:
        return modules
    by_cost = sorted(modules, key=lambda m: (m.compute_us + m.communication_us, m.parameter_bytes), reverse=True)
    kept = {id(each) for each in by_cost[:MOST_ROWS]}
    return [each for each in modules if id(each) in kept]


def _stages(step: StepSummary, found: PlanDescription, width: int) -> Table:
    """Table with a row per stage; forward and backward are of one microbatch, the rest of a step."""
    ranks = len({stage.rank for stage in step.stages})
    table = Table(box=box.SIMPLE, pad_edge=False, title_justify="left", title=(
        f"{len(step.stages)} stages on {ranks} ranks under {step.schedule}, {step.microbatches} microbatches, bubble "
        f"{100 * step.bubble:.1f} %"))
    names = ["stage", "rank", "forward + backward", "busy", "peak", *([WAITING.split()[0], "devices"] if width >= WIDE else []),
             "sends on"]
    for name in names:
        table.add_column(name, no_wrap=name != "sends on")
    for stage in step.stages:
        table.add_row(*map(Text, (
            str(stage.number), str(stage.rank), f"{format_us(stage.forward_us)} + {format_us(stage.backward_us)}",
            format_us(stage.busy_us), peak_text(stage, found),
            *([_us(stage.parts.get(WAITING, 0.0)), stage.devices] if width >= WIDE else []), sends_text(stage))))
    return table


def sends_text(stage: StageSummary) -> str:
    """The bytes that a stage sends to the next for one microbatch."""
    on = [each for each in stage.sends if not each.backward]
    total = format_bytes(sum(each.bytes for each in on)) if on else ""
    return f"{total} in {len(on)} tensors" if len(on) > 1 else total


def peak_text(stage: StageSummary, found: PlanDescription) -> str:
    share = f" ({stage.peak_bytes / found.limit_bytes:.0%})" if found.limit_bytes else ""
    return f"{format_bytes(stage.peak_bytes)}{share}"


def _axes(found: PlanDescription) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("axis", "links", "splits", "traffic", "bytes", "time"):
        table.add_column(name, justify="right" if name in ("bytes", "time") else "left", overflow="fold")
    for axis in found.axes:
        kinds = ", ".join(sorted((kind for kind in axis.communication.by_kind if kind != "slice"),
                                 key=lambda kind: -axis.communication.by_kind[kind]))
        table.add_row(*map(Text, (
            f"{axis.name}={axis.size}", axis.links, ", ".join(axis.splits[:2 * MOST_WORDS]), kinds,
            _bytes(axis.communication.bytes), _us(axis.communication.us))))
    return table


def _of_limit(found: PlanDescription) -> str:
    if not found.limit_bytes:
        return ""
    left = found.limit_bytes - found.peak_bytes
    rest = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    return f"; {found.peak_bytes / found.limit_bytes:.0%} of {found.limit_name}, {format_bytes(found.limit_bytes)}: {rest}"


def describe_microbatches(times: MicrobatchPlan, parameters: Mapping[str, ParameterPlan]) -> str:
    """Describe the microbatches: their number, the operations outside of the loop, the order of forward and backward, and the
    parameters that each of them gathers, or whose gradients it reduces."""
    outside = ", ".join(times.whole[:MOST_NAMES])
    outside += f" and {len(times.whole) - MOST_NAMES} more" * (len(times.whole) > MOST_NAMES)
    order = "backward of each after its forward" if times.loss_inside else (
        "forward of all first, since the loss is not in this graph: saved activations of all are in memory at once")
    repeated = "".join(
        f"; each {verb} {_sharded_parameters(names, parameters)}"
        for verb, names in (("gathers", times.gathered), ("reduces the gradients of", times.reduced)) if names)
    return (f"{times.count}, with {100 * times.share:.1f} % of the work on batch rows in their loop"
            f"{f' (outside: {outside})' if outside else ''}; {order}{repeated}")


def _sharded_parameters(names: Sequence[str], parameters: Mapping[str, ParameterPlan]) -> str:
    """Names of parameters without list indices, or "all sharded parameters"."""
    if {name for name, each in parameters.items() if each.bytes_per_device < each.bytes_whole} <= {*names}:
        return "all sharded parameters"
    return ", ".join(sorted({block_class(name) for name in names}))


def _disagreements(graph: GraphPlan, step: StepSummary) -> Iterator[RenderableType]:
    """Notes where operations and collectives do not add up to the prediction; microbatches or stages are not expected to."""
    if graph.microbatches is not None or graph.pipeline is not None:
        return
    compute_us = sum(each.predicted_us * graph.runs(each) for each in graph.operations.values())
    moved_us = sum(hop.predicted_us * move.multiplicity for move in graph.redistributions for hop in move.hops)
    for what, predicted, total in (("compute", graph.predicted.compute_us, compute_us),
                                   ("communication", graph.predicted.communication_us, moved_us)):
        if abs(total - predicted) > 0.01 * max(total, predicted):
            yield labelled("note", f"the {what} of the blocks adds up to {format_us(total)}, not {format_us(predicted)}")


def describe_solver(report: SolverReport) -> str:
    """Status, bound and gap of a solve, as far as they are known."""
    bound = "" if report.bound is None else f", bound {format_objective(report.bound, report.objective)}"
    gap = "" if report.gap is None else f", gap {report.gap:.2%}"
    step = "" if report.simulated_us is None else f", of {format_us(report.simulated_us)} with overlap"
    return f"{report.status}{step}{bound}{gap}"


def describe_energy(energy_j: float, step_time_us: float, devices: int, label: str | None) -> str:
    """Energy of a step on all devices, average power per device, and the source of the figures."""
    power = f", {energy_j / (step_time_us * 1e-6) / devices:.3g} W average power each" if step_time_us else ""
    return f"energy {format_joules(energy_j)} a step on {devices} devices{power} ({label})"


def describe_memory(memory: MemoryBytes, at_peak: Peak | None) -> str:
    """Peak memory of a device and, if known, the parts that add up to it."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in (at_peak.parts if at_peak else {}).items())
    return f"peak {format_bytes(memory.peak)}{': ' * bool(parts)}{parts}"
