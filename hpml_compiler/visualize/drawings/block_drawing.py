"""One block of a plan: heavy operators with their weights, merged cheap ones, and collectives in the colors of their axes."""
from __future__ import annotations

import graphviz

from hpml_compiler.visualize.description.block_summary import CHEAP, COLLECTIVE, HEAVY, OUTSIDE, BlockStep, BlockSummary
from hpml_compiler.visualize.description.records import PlanDescription
from hpml_compiler.visualize.drawings.labels import FONT, axis_colors, colored, font, heading, row, table, tooltip
from hpml_compiler.visualize.drawings.overview_drawing import WIDTH
from hpml_compiler.visualize.formatting import format_bytes, format_us

FILLS = {HEAVY: "#dce8f7", CHEAP: "#f6f6f6", COLLECTIVE: "#ffffff", OUTSIDE: "#ffffff"}
STRIPES = "#ffffff:#d8d8d8:#ffffff:#d8d8d8:#ffffff:#d8d8d8:#ffffff"
HOST = "host"


def draw_block(found: PlanDescription, block: BlockSummary, backward: bool) -> graphviz.Digraph:
    drawing = graphviz.Digraph("block", graph_attr={
        **FONT, "rankdir": "TB", "nodesep": "0.3", "ranksep": "0.35", "pad": "0.2", "labelloc": "t", "labeljust": "l",
        "size": f"{WIDTH},400", "outputorder": "edgesfirst"},
        node_attr={**FONT, "shape": "box"}, edge_attr={**FONT, "color": "#666666", "arrowsize": "0.6"})
    phases = "forward and backward" if backward else "forward"
    per = "of one microbatch" if block.microbatches > 1 else "of one run"
    notes = f"blue: heavy operators; gray: cheap ones, merged ({block.merged} operators); ovals: collectives"
    lines = [font(f"{phases} {per}, on one device"), font(notes)]
    if any(step.recomputed for step in block.steps.values()):
        lines.append(font("striped: recomputed in backward"))
    if block.saved_bytes or block.offloaded_bytes:
        lines.append(font(_remembered(block)))
    if block.left_out:
        whole = block.left_out + len(block.steps)
        lines.append(font(f"the {block.left_out} cheapest of {whole} steps are not drawn: {format_us(block.left_out_us)}"))
    drawing.attr(label=heading(found, f"block {block.name}", lines))
    for half in (False, True) if backward else (False,):
        inner = graphviz.Digraph(f"cluster_{half}", graph_attr={
            "label": "backward" if half else "forward", "pencolor": "#bbbbbb", "style": "rounded"}) if backward else drawing
        for number, step in enumerate(block.steps.values()):
            if step.backward == half:
                _draw_step(inner, f"n{number}", step, found)
                if step.offloaded_bytes:
                    drawing.node(HOST, table([row(font("host memory"))]), shape="plain")
                    drawing.edge(f"n{number}", HOST, label=format_bytes(step.offloaded_bytes), style="dashed")
        if inner is not drawing:
            drawing.subgraph(inner)
    numbers = {name: f"n{number}" for number, name in enumerate(block.steps)}
    colors = axis_colors(found.mesh)
    for tail, head in block.edges:
        if tail in numbers and head in numbers:
            axis = block.steps[tail].axis or block.steps[head].axis
            across = block.steps[tail].backward != block.steps[head].backward
            drawing.edge(numbers[tail], numbers[head], color=colors.get(axis, "#666666"),
                         style="dashed" if across else "solid", constraint=str(not across).lower())
    return drawing


def _remembered(block: BlockSummary) -> str:
    """Bytes that are kept for backward, in one of the equal blocks."""
    drawn = sum(step.saved_bytes + step.offloaded_bytes for step in block.steps.values())
    rest = block.saved_bytes + block.offloaded_bytes - drawn
    text = f"{block.path or 'it'} saves {format_bytes(block.saved_bytes)}"
    text += f", offloads {format_bytes(block.offloaded_bytes)} to the host" * bool(block.offloaded_bytes)
    return text + f"; {format_bytes(rest)} of that is in no box" * (rest > 0.01 * (drawn + rest))


def _draw_step(drawing: graphviz.Digraph, identifier: str, step: BlockStep, found: PlanDescription) -> None:
    text = "\n".join([step.title, f"{step.us:.3f} us, {step.bytes:.0f} bytes", *step.operators[:40]])
    if step.kind == COLLECTIVE:
        color = axis_colors(found.mesh).get(step.axis, "#444444")
        saved = f"<br/>{font(f'saved {format_bytes(step.saved_bytes)}', '#256b36')}" if step.saved_bytes else ""
        label = (f"<{font(f'{step.title} over {step.axis}', color, bold=True)}<br/>"
                 f"{font(f'{format_bytes(step.bytes)}, {format_us(step.us)}', color)}{saved}>")
        drawing.node(identifier, label, shape="ellipse", color=color, penwidth="1.6", style="filled", fillcolor="#ffffff",
                     tooltip=tooltip(text))
        return
    lines = [font(step.title, "#111111", bold=step.kind == HEAVY)]
    if not any(size > 1 for size in found.mesh.values()):
        pass  # all is whole on one device
    elif step.weight_words or step.kind == HEAVY and step.title[-1:].isdigit():
        lines.append(font("weight ") + colored(step.weight_words, found.mesh))
    if (step.kind != CHEAP or step.words) and any(size > 1 for size in found.mesh.values()):
        lines.append((font("gives ") if step.kind != OUTSIDE else "") + colored(step.words, found.mesh))
    if step.us >= 0.005:
        lines.append(font(format_us(step.us)))
    if step.kind == OUTSIDE and step.bytes:
        lines.append(font(format_bytes(step.bytes)))
    if step.saved_bytes:
        lines.append(font(f"saved {format_bytes(step.saved_bytes)}", "#256b36"))
    if step.recomputed:
        lines.append(font("recomputed in backward", "#555555"))
    style = "striped" if step.recomputed else "rounded,dashed" if step.kind == OUTSIDE else "rounded,filled"
    fill = STRIPES if step.recomputed else FILLS[step.kind]
    drawing.node(identifier, f"<{'<br/>'.join(lines)}>", style=style, fillcolor=fill,
                 color="#5b7fa8" if step.kind == HEAVY else "#aaaaaa", tooltip=tooltip(text))
