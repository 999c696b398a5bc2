"""A plan as a table: a row per class of equal blocks, then memory, collectives and replicated values."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.plans.schema import GraphPlan, MemoryBytes, ParameterPlan, SolverReport
from hpml_compiler.plans.unsplit_graph import why_not_split
from hpml_compiler.visualize.equal_blocks import BlockClass, block_classes
from hpml_compiler.visualize.formatting import (
    format_bytes,
    format_collectives,
    format_count,
    format_joules,
    format_mesh,
    format_objective,
    format_placements,
    format_us,
)
from hpml_compiler.visualize.pipeline_table import stage_table
from hpml_compiler.visualize.terminal import as_text, labelled
from passes.graph.placement_graph import block_class

MOST_ROWS = 40
MOST_LINES = 4  # of placements in a row
MOST_NAMES = 3  # of replicated nodes, and of other meshes


def render_text(plan: PlanContent, width: int | None = None) -> str:
    """The table as plain text of at most `width` columns (default: the terminal's)."""
    return as_text(renderable(plan), width)


def renderable(plan: PlanContent) -> RenderableType:
    """The table for a rich console."""
    where = f"{plan.world_size} devices" + (f" of {plan.cluster}" if plan.cluster else "")
    parts: list[RenderableType] = [Text(f"mesh {format_mesh(plan.mesh)}: {where}, torch {plan.torch_version}")]
    if plan.links:
        parts.append(labelled("links", "; ".join(f"{axis} {links}" for axis, links in plan.links.items())))
    for graph in plan.graphs:
        parts += [Text(""), *_graph(graph)]
    for part in plan.unplanned:
        where = f" ({part.where})" if part.where else ""
        parts.append(labelled("not planned" if part.used else "not used",
                              f"{len(part.parameters)} parameters, {part.elements:,} elements: {part.reason}{where}"))
    if len(plan.step_graphs) > 1:
        parts.append(labelled("per device", describe_memory(plan.memory, plan.peak)))
    for attempt in plan.rejected[:MOST_NAMES]:
        cost = "" if attempt.cost is None else f"{format_objective(attempt.cost, attempt.objective)}, "
        parts.append(labelled("rejected", f"mesh {format_mesh(attempt.mesh)}: {cost}{attempt.reason}"))
    if len(plan.rejected) > MOST_NAMES:
        parts.append(labelled("", f"and {len(plan.rejected) - MOST_NAMES} more meshes"))
    if plan.seconds:
        took = ", ".join(f"{phase} {format_us(1e6 * seconds)}" for phase, seconds in plan.seconds.items())
        parts.append(labelled("took", took))
    return Group(*parts)


def _graph(graph: GraphPlan) -> Iterator[RenderableType]:
    cost = graph.predicted
    yield Text(f"{graph.name} ({'training' if graph.training else 'inference'}): {format_us(cost.step_time_us)} a step "
               f"predicted ({describe_solver(graph.solver)})")
    yield Text(f"compute {format_us(cost.compute_us)}, communication {format_us(cost.communication_us)}, "
               f"optimizer {format_us(cost.optimizer_us)}"
               + (f", recomputation and offloading {format_us(cost.again_us)}" if cost.again_us else ""))
    if cost.energy_j is not None:
        yield Text(describe_energy(cost.energy_j, cost.step_time_us, math.prod(graph.mesh.values()), cost.energy_label))
    classes = block_classes(graph)
    yield _table(graph, classes)
    yield from _disagreements(graph, classes)
    for half, report in graph.blocks.items():
        yield labelled(half, f"{report.compiled} of {report.calls} calls compiled, in {report.segments} segments of which "
                             f"{report.different} are distinct")
    if graph.microbatches is not None:
        yield labelled("microbatches", describe_microbatches(graph.microbatches, graph.parameters))
    if graph.pipeline is not None:
        yield stage_table(graph.pipeline)
    yield labelled("per device", describe_memory(graph.memory, graph.at_peak))
    yield labelled("collectives", format_collectives(graph.collectives) or "none")
    if why := why_not_split(graph):
        yield labelled("not split", why.partition("; ")[2])
    for left in graph.left_whole[:MOST_NAMES]:
        yield labelled("replicated", f"{left.name}: {left.reason}")
    if len(graph.left_whole) > MOST_NAMES:
        yield labelled("", f"and {len(graph.left_whole) - MOST_NAMES} more")


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
            f"{f' (outside: {outside})' if outside else ''}; {order}{repeated}. Figures by block are for the full batch")


def _sharded_parameters(names: Sequence[str], parameters: Mapping[str, ParameterPlan]) -> str:
    """Names of parameters without list indices, or "all sharded parameters"."""
    if {name for name, each in parameters.items() if each.bytes_per_device < each.bytes_whole} <= {*names}:
        return "all sharded parameters"
    return ", ".join(sorted({block_class(name) for name in names}))


def _disagreements(graph: GraphPlan, classes: list[BlockClass]) -> Iterator[RenderableType]:
    """Notes where the table does not add up to the prediction above it; with microbatches or stages it is not expected to."""
    if graph.microbatches is not None or graph.pipeline is not None:
        return
    for what, predicted, total in (
        ("compute", graph.predicted.compute_us, sum(each.compute_us for each in classes)),
        ("communication", graph.predicted.communication_us, sum(each.communication_us for each in classes)),
    ):
        if abs(total - predicted) > 0.01 * max(total, predicted):
            yield labelled("note", f"the {what} of the blocks adds up to {format_us(total)}, not {format_us(predicted)}")


def describe_solver(report: SolverReport) -> str:
    """Status, bound and gap of a solve, as far as they are known."""
    bound = "" if report.bound is None else f", bound {format_objective(report.bound, report.objective)}"
    gap = "" if report.gap is None else f", gap {report.gap:.2%}"
    return f"{report.status}{bound}{gap}"


def describe_energy(energy_j: float, step_time_us: float, devices: int, label: str | None) -> str:
    """Energy of a step on all devices, average power per device, and the source of the figures."""
    power = f", {energy_j / (step_time_us * 1e-6) / devices:.3g} W average power each" if step_time_us else ""
    return f"energy {format_joules(energy_j)} a step on {devices} devices{power} ({label})"


def describe_memory(memory: MemoryBytes, at_peak: Peak | None) -> str:
    """Peak memory of a device and, if known, the parts that add up to it."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in (at_peak.parts if at_peak else {}).items())
    return f"peak {format_bytes(memory.peak)}{': ' * bool(parts)}{parts}"


def _table(graph: GraphPlan, classes: list[BlockClass]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("block", overflow="fold", max_width=24)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("parameters", justify="right")
    table.add_column("placements", overflow="fold", ratio=1, min_width=12)
    table.add_column("compute", justify="right")
    table.add_column("sent", justify="right")
    shown = _costliest(classes)
    for each in shown:
        sizes = f"{format_count(each.parameter_count)}\n{format_bytes(each.bytes_per_device)}"
        table.add_row(*map(Text, (
            each.name,
            f"x{each.multiplicity}",
            sizes if each.parameter_count else "",
            "\n".join(_placement_lines(graph, each)),
            format_us(each.compute_us),
            f"{format_us(each.communication_us)}\n{_bytes_sent(each)}" if each.collectives else "",
        )))
    if len(shown) < len(classes):
        rest = [each for each in classes if each not in shown]
        table.add_row(*map(Text, (
            f"{len(rest)} cheaper blocks", "", f"{format_count(sum(each.parameter_count for each in rest))}", "",
            format_us(sum(each.compute_us for each in rest)), format_us(sum(each.communication_us for each in rest)),
        )))
    return table


def _costliest(classes: list[BlockClass]) -> list[BlockClass]:
    """At most MOST_ROWS classes, those with the most time and then the most bytes, in their order."""
    if len(classes) <= MOST_ROWS:
        return classes
    by_cost = sorted(classes, key=lambda c: (c.compute_us + c.communication_us, c.bytes_per_device), reverse=True)
    kept = {id(each) for each in by_cost[:MOST_ROWS]}
    return [each for each in classes if id(each) in kept]


def _bytes_sent(each: BlockClass) -> str:
    return format_bytes(sum(total.bytes for total in each.collectives.values()))


def _placement_lines(graph: GraphPlan, each: BlockClass) -> Iterator[str]:
    """A line for each placement of the block's parameters, the largest first, then the most common placement of its values."""
    block = each.blocks[0]
    names: dict[str, list[str]] = defaultdict(list)
    for name, parameter in sorted(block.parameters.items(), key=lambda item: -item[1].bytes_whole):
        short = name[len(block.path):].lstrip(".")
        names[format_placements(parameter.placements, graph.mesh)].append(short)
    for placements, members in list(names.items())[:MOST_LINES]:
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"{placements}: {members[0]}{more}"
    if len(names) > MOST_LINES:
        yield f"and {len(names) - MOST_LINES} other placements"
    values = Counter(format_placements(output, graph.mesh) for operation in block.operations.values()
                     if not operation.backward for output in operation.outputs if output)
    if values:
        placements, count = values.most_common(1)[0]
        yield f"values {placements}: {count} of {values.total()}"
