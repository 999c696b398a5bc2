"""The overview of a plan: pipeline stages from left to right, or modules from top to bottom."""
from __future__ import annotations

import textwrap
from collections.abc import Sequence

import graphviz

from hpml_compiler.visualize.description.describe_plan import modules_of
from hpml_compiler.visualize.description.placement_words import dims_text
from hpml_compiler.visualize.description.records import (
    COMMUNICATION,
    COMPUTE,
    RECOMPUTE,
    EdgeSummary,
    MessageSummary,
    ModuleSummary,
    PlanDescription,
    StageSummary,
    StepSummary,
)
from hpml_compiler.visualize.drawings.labels import (
    FONT,
    MEMORY_COLORS,
    PART_COLORS,
    bar,
    colored,
    font,
    heading,
    legend,
    memory_text,
    row,
    table,
    tooltip,
)
from hpml_compiler.visualize.formatting import format_bytes, format_count, format_place, format_us, shorten

MOST_IN_A_ROW = 5
"""Stages from left to right; more are drawn from top to bottom."""
MOST_MODULES = 40
SMALL = 0.01
"""Values of less than this share of the largest that passes between modules have no line of their own."""
SHOWN_US = 0.005
"""Less would be displayed as 0.00 us."""
LINE = 120
"""Characters in a line of the heading."""
WIDTH = 22.0
"""Size of a picture, in inches of 72 points."""


def overview(found: PlanDescription, max_nodes: int = 300) -> graphviz.Digraph:
    across = any(1 < len(step.stages) <= MOST_IN_A_ROW for step in found.steps)
    drawing = graphviz.Digraph("plan", graph_attr={
        **FONT, "rankdir": "LR" if across else "TB", "nodesep": "0.35", "ranksep": "0.9" if across else "0.55",
        "pad": "0.2", "labelloc": "t", "labeljust": "l",
        "size": f"{WIDTH},400", "splines": "true", "outputorder": "edgesfirst"},
        node_attr={**FONT, "shape": "plain"},
        edge_attr={**FONT, "color": "#444444", "fontcolor": "#333333", "arrowsize": "0.7"})
    lines = [font(f"{format_us(found.step_us)} a step predicted, ") + memory_text(found.peak_bytes, found.limit_bytes)]
    lines += [line for step in found.steps for line in _step_lines(step, alone=len(found.steps) == 1)]
    parts = {part: sum(step.parts.get(part, 0.0) for step in found.steps) for part in PART_COLORS}
    lines.append(legend(PART_COLORS, {part: format_us(us) for part, us in parts.items() if us}))
    others = dict.fromkeys(part for step in found.steps for stage in step.stages for part in stage.memory)
    at_peak = sorted(found.memory.items(), key=lambda item: -item[1])
    lines.append(legend(MEMORY_COLORS, {**{part: format_bytes(nbytes) for part, nbytes in at_peak},
                                        **{part: "" for part in others if part not in found.memory}}))
    drawing.attr(label=heading(found, format_place(found.mesh, found.devices, found.cluster), lines))
    for number, step in enumerate(found.steps):
        inner = drawing if len(found.steps) == 1 else graphviz.Digraph(
            f"cluster_{number}",
            # without a line around it, which labels of its edges may cross
            graph_attr={"label": f"<{font(step.name, '#111111', 12, True)}>", "pencolor": "transparent", "margin": "16"})
        if step.stages:
            _draw_stages(inner, step, found, f"g{number}")
        else:
            _draw_modules(inner, step, found, f"g{number}", min(MOST_MODULES, max(1, max_nodes // len(found.steps))))
        if inner is not drawing:
            drawing.subgraph(inner)
    return drawing


def _step_lines(step: StepSummary, alone: bool) -> list[str]:
    """Lines on a step: its plan; its parts, which of a step alone are the legend; the reason why nothing is split."""
    gap = "" if step.gap is None else f", gap {step.gap:.2%}"
    times = f", {step.microbatches} microbatches" * (step.microbatches > 1) + f" under {step.schedule}" * bool(step.schedule)
    lines = [f"{step.name} ({step.status}{gap}){times}"]
    if not alone:
        lines += textwrap.wrap(", ".join(f"{part} {format_us(us)}" for part, us in step.parts.items()), LINE)
    if step.loss and not step.loss.startswith("at once"):
        lines += textwrap.wrap(f"the loss is computed {step.loss}", LINE)
    for each in step.outputs:
        lines += textwrap.wrap(f"returns {each}", LINE)
    return [font(line) for line in (*lines, *textwrap.wrap(step.not_split, LINE))]


def _draw_stages(drawing: graphviz.Digraph, step: StepSummary, found: PlanDescription, prefix: str) -> None:
    for stage in step.stages:
        modules = modules_of(step, stage.number)
        title = font(f"stage {stage.number}", "#111111", 12, True)
        rows = [row(title + "&#160;&#160;" + font(stage.devices))]
        rows += [row(_module_line(each) + "<br/>" + colored(each.sharding, found.mesh)) for each in modules[:MOST_MODULES]
                 if each.parameters or each.compute_us > 0.01 * stage.busy_us]
        rows.append(row(font(f"forward {format_us(stage.forward_us)}, backward {format_us(stage.backward_us)} a microbatch")))
        rows.append(row(bar(stage.parts, PART_COLORS, step.step_us)))
        rows.append(row(font(f"busy {format_us(stage.busy_us)} of {format_us(step.step_us)}, "
                             f"{stage.in_flight} of {step.microbatches} in flight")))
        if stage.memory:
            rows.append(row(bar({k: float(v) for k, v in stage.memory.items()}, MEMORY_COLORS,
                                float(found.limit_bytes or stage.peak_bytes))))
            rows.append(row(memory_text(stage.peak_bytes, found.limit_bytes)))
        name = f"{prefix}_stage{stage.number}"
        drawing.node(name, table(rows), id=name, tooltip=tooltip(_stage_tooltip(stage, modules)))
    for stage, after in zip(step.stages, step.stages[1:], strict=False):
        on = [each for each in stage.sends if not each.backward]
        back = [each for each in after.sends if each.backward]
        label = _message_label(on, back) if on or stage.rank != after.rank else "same devices"
        names = ", ".join(each.value for each in (*on, *back))
        drawing.edge(f"{prefix}_stage{stage.number}", f"{prefix}_stage{after.number}", label=_plain(label),
                     tooltip=tooltip(names), dir="both" if back else "forward", arrowtail="empty", weight="10")


def _message_label(on: Sequence[MessageSummary], back: Sequence[MessageSummary]) -> str:
    """The largest value that goes on, the bytes of all, and those of their gradients."""
    lines = []
    if on:
        largest = max(on, key=lambda each: each.bytes)
        more = f" and {len(on) - 1} more" if len(on) > 1 else ""
        lines += [f"{dims_text(largest.dims)}{more}"] if largest.dims else []
        lines += [f"{format_bytes(sum(each.bytes for each in on))} a microbatch"]
    if back:
        lines.append(f"back {format_bytes(sum(each.bytes for each in back))}")
    return "\n".join(lines)


def _stage_tooltip(stage: StageSummary, modules: list[ModuleSummary]) -> str:
    parts = "\n".join(f"{part}: {format_us(us)}" for part, us in stage.parts.items())
    memory = "\n".join(f"{part}: {nbytes} bytes" for part, nbytes in stage.memory.items())
    return f"stage {stage.number} on {stage.devices}\n{parts}\n{memory}\n" + ", ".join(each.name for each in modules)


def _module_line(each: ModuleSummary) -> str:
    times = f"x {each.count}" if each.count > 1 else ""
    return font(shorten(each.name, 44), "#111111", bold=True) + "&#160;&#160;&#160;&#160;" * bool(times) + font(times)


def _draw_modules(drawing: graphviz.Digraph, step: StepSummary, found: PlanDescription, prefix: str, most: int) -> None:
    cost = {number: (each.compute_us + each.communication_us, each.parameter_bytes) for number, each in enumerate(step.modules)}
    idle = {number for number, each in enumerate(step.modules)
            if cost[number] == (0.0, 0) and not each.saved_bytes + each.recompute_us}
    shown = sorted(sorted(set(cost) - idle or set(cost), key=lambda number: cost[number], reverse=True)[:most])
    longest = max((us + step.modules[number].recompute_us for number, (us, _) in cost.items()), default=0.0)
    for number in shown:
        each = step.modules[number]
        parts = {COMPUTE: each.compute_us, COMMUNICATION: each.communication_us, RECOMPUTE: each.recompute_us}
        rows = [row(_module_line(each)), row(colored(each.sharding, found.mesh))]
        if each.parameter_count:
            count, stored_bytes = format_count(each.parameter_count), format_bytes(each.parameter_bytes)
            rows.append(row(font(f"{count} parameters, {stored_bytes} a device")))
        if sum(parts.values()) >= 0.005 * longest:
            rows.append(row(bar(parts, PART_COLORS, longest)))
        work = ", ".join(f"{part} {format_us(us)}" for part, us in parts.items() if us >= SHOWN_US)
        rows.append(row(font(work or _without_work(each))))
        stored = {"parameters": float(each.parameter_bytes), "saved": float(each.saved_bytes)}
        if found.limit_bytes and sum(stored.values()) >= 0.001 * found.limit_bytes:
            rows.append(row(bar(stored, MEMORY_COLORS, float(found.limit_bytes))))
        if each.saved_bytes or each.offloaded_bytes:
            text = f"saves {format_bytes(each.saved_bytes)}" if each.saved_bytes else "saves nothing"
            rows.append(row(font(text + f", offloads {format_bytes(each.offloaded_bytes)}" * bool(each.offloaded_bytes))))
        drawing.node(f"{prefix}_{number}", table(rows), id=f"{prefix}_{number}", tooltip=tooltip(module_tooltip(each)))
    if rest := [each for number, each in enumerate(step.modules) if number not in {*shown, *idle}]:
        rest_us = format_us(sum(each.compute_us for each in rest))
        text = f"the {len(rest)} cheapest of {len(step.modules)} modules are not drawn: {rest_us}"
        drawing.node(f"{prefix}_left_out", table([row(font(text))], border=0))
    _draw_edges(drawing, step, shown, prefix)


def _without_work(each: ModuleSummary) -> str:
    more = f" and {len(each.read_by) - 2} more" if len(each.read_by) > 2 else ""
    return f"read by {', '.join(each.read_by[:2])}{more}" if each.read_by else "no time of its own"


def _draw_edges(drawing: graphviz.Digraph, step: StepSummary, shown: list[int], prefix: str) -> None:
    drawn = [edge for edge in step.edges if edge.tail in shown and edge.head in shown and edge.tail < edge.head]
    largest = max((edge.bytes for edge in drawn), default=0)
    linked = set()
    for edge in drawn:
        if edge.bytes >= SMALL * largest:
            drawing.edge(f"{prefix}_{edge.tail}", f"{prefix}_{edge.head}", label=_plain(edge_label(edge)),
                         tooltip=tooltip(edge_tooltip(edge)), weight="10" if edge.head == edge.tail + 1 else "1")
            linked.add((edge.tail, edge.head))
    for tail, head in zip(shown, shown[1:], strict=False):  # keeps the order of execution where nothing large is read
        if (tail, head) not in linked:
            drawing.edge(f"{prefix}_{tail}", f"{prefix}_{head}", style="invis", weight="5")


def edge_label(edge: EdgeSummary) -> str:
    back = f", back {format_bytes(edge.backward_bytes)}" if edge.backward_bytes else ""
    lines = [f"{dims_text(edge.dims) or edge.value}: {format_bytes(edge.bytes)}{back}"]
    lines += [f"{each.kind} over {each.axis}: {format_us(each.us)}" for each in edge.collectives]
    return "\n".join(lines)


def edge_tooltip(edge: EdgeSummary) -> str:
    return f"{edge.value} ({edge.dims or 'unknown dims'}): {edge.bytes} bytes a device"


def module_tooltip(each: ModuleSummary) -> str:
    lines = [f"{each.name} x{each.count}", f"compute {each.compute_us:.2f} us",
             *(f"{axis}: {total.us:.2f} us, {total.bytes:.0f} bytes, {total.count:g} collectives"
               for axis, total in each.communication.items()),
             f"saved {each.saved_bytes} bytes",
             *(f"{p.name} {list(p.shape)} {p.dtype}: {', '.join(p.placements)}" for p in each.parameters[:20])]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text for a plain label."""
    lines = ("".join(each if each.isprintable() else " " for each in line)[:80] for line in text.split("\n"))
    flat = "\n".join(f"  {line}  " for line in lines)
    return graphviz.nohtml(graphviz.escape(flat).replace("\n", "\\n"))
