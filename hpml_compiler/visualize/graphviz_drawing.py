"""Draw a plan with Graphviz: a node per class of equal blocks, or a cluster of operations for each opened class."""
from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphviz

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.visualize.equal_blocks import BlockClass, block_classes
from hpml_compiler.visualize.formatting import format_bytes, format_mesh, format_us
from hpml_compiler.visualize.picture_files import picture_format
from hpml_compiler.visualize.pipeline_table import stage_labels
from hpml_compiler.visualize.plan_sketch import INPUTS, Sketch, SketchEdge, SketchNode, sketch
from hpml_compiler.visualize.plan_table import describe_memory, describe_solver
from passes.errors import BadInput, MissingDependency
from passes.filesystem.text_files import is_device, write_file

SPLIT, WHOLE = "#d7e8fb", "#f4f4f4"
SHAPES = {"block": "box3d", "operation": "box", "parameter": "ellipse", "end": "plaintext"}


def digraph(
    plan: PlanContent, expanded: bool = False, expand: str | Sequence[str] = (), max_nodes: int = 300
) -> graphviz.Digraph:
    """The plan as a graph of at most `max_nodes` nodes (inputs and outputs not counted); a label counts the nodes left out.

    `expanded` opens every class of blocks, `expand` the named ones, by their name in the table or the path of any block of the
    class. An opened class shows the operations of its first block. Blue nodes are sharded over the mesh, dashed lines are
    backward, red edges have collectives. Raises BadInput for a name that no block has.
    """
    names = {expand} if isinstance(expand, str) else set(expand)
    all_classes = [block_classes(graph) for graph in plan.graphs]
    if unknown := {name for name in names if not any(_is_named(each, {name}) for part in all_classes for each in part)}:
        known = ", ".join(dict.fromkeys(each.name for part in all_classes for each in part))
        raise BadInput(what=f"the plan has no block {', '.join(sorted(unknown))}", where="graphviz(expand=...)",
                       next_step=f"the blocks are {known}")
    font = {"fontname": "Helvetica,Arial,sans-serif", "fontsize": "10"}
    # margins larger than the difference in text width between the fonts of different viewers
    drawing = graphviz.Digraph("plan", graph_attr=font | {"labelloc": "t", "nodesep": "0.7", "pad": "0.2",
                                                          "outputorder": "edgesfirst"},  # so that no line crosses a box's text
                               node_attr=font | {"margin": "0.22,0.1"}, edge_attr=font)
    where = f"{plan.world_size} devices" + (f" of {plan.cluster}" if plan.cluster else "")
    drawing.attr(label=_title(f"mesh {format_mesh(plan.mesh)}: {where}"))
    for position, (graph, classes) in enumerate(zip(plan.graphs, all_classes, strict=True)):
        opened = {each.name for each in classes if expanded or _is_named(each, names)}
        found = sketch(graph, classes, opened, max(1, max_nodes // len(plan.graphs)))
        title = (f"{graph.name}: {format_us(graph.predicted.step_time_us)} a step ({describe_solver(graph.solver)})\n"
                 f"{describe_memory(graph.memory, graph.at_peak)}")
        inner = graphviz.Digraph(f"cluster_g{position}")
        # a frame separates several graphs; around a single graph it would only cut through edge labels
        inner.attr(pencolor="gray" if len(plan.graphs) > 1 else "transparent")
        _draw(inner, found, f"g{position}_", title, [] if graph.pipeline is None else stage_labels(graph.pipeline))
        drawing.subgraph(inner)
    return drawing


def render(plan: PlanContent, path: Path, **options: Any) -> Path:
    """Draw a plan into `path` (.svg, .png, .pdf). Raises BadInput for another suffix. If the program `dot` is not installed,
    writes the .gv file next to `path` and raises MissingDependency."""
    kind = picture_format(path, "the plan")
    drawing = digraph(plan, **options)
    try:
        write_file(path, drawing.pipe(format=kind), "the picture of the plan")
    except graphviz.ExecutableNotFound as error:
        source = Path("plan.gv") if is_device(path) else path.with_suffix(".gv")
        write_file(source, drawing.source, "the graph of the plan")
        raise MissingDependency(
            what=f"cannot draw {path.name}: Graphviz's program dot is not installed",
            where=f"the graph is in {source}",
            next_step=f"apt-get install graphviz, then dot -T{kind} {source} -o {path}",
        ) from error
    return path


def _is_named(each: BlockClass, names: set[str]) -> bool:
    return each.name in names or any(block.path in names for block in each.blocks)


def _draw(drawing: graphviz.Digraph, found: Sketch, prefix: str, title: str, stages: Sequence[str]) -> None:
    """Add the nodes and edges of one graph to the drawing; stages: labels of its pipeline stages."""
    drawing.attr(label=_escape(title), margin="24")
    for k, label in enumerate(stages):
        stage = graphviz.Digraph(f"cluster_{prefix}stage{k}", graph_attr={"label": _escape(label), "pencolor": "gray",
                                                                         "style": "rounded"})
        _draw_part(stage, found, prefix, k)
        drawing.subgraph(stage)
    _draw_part(drawing, found, prefix, None)
    if found.left_out:
        total = found.left_out + sum(node.kind != "end" for node in found.nodes.values())
        drawing.node(f"{prefix}left_out", _escape(f"the {found.left_out} cheapest of {total} nodes are not drawn"),
                     shape="plaintext")
    rank = {name: position for position, name in enumerate(found.nodes)}
    # edges with labels last, so that no other line is drawn over a label
    for (tail, head), edge in sorted(found.edges.items(), key=lambda pair: bool(pair[1].collectives)):
        # a backward-pointing edge, as from a block's last operation to the next block's first, must not affect Graphviz's ranks
        forward = rank[tail] < rank[head] or tail == INPUTS
        drawing.edge(prefix + tail, prefix + head, label=_edge_label(edge), constraint=str(forward).lower(),
                     style="dashed" if edge.backward else "solid",
                     color="gray" if edge.order else "firebrick" if edge.collectives else "black")


def _draw_part(drawing: graphviz.Digraph, found: Sketch, prefix: str, stage: int | None) -> None:
    """Add the nodes of one stage, or those outside of any stage."""
    nodes = {name: node for name, node in found.nodes.items() if node.stage == stage}
    for index, (cluster, label) in enumerate(found.clusters.items()):
        opened = {name: node for name, node in nodes.items() if node.cluster == cluster}
        if opened:
            inner = graphviz.Digraph(f"cluster_{prefix}{index}", graph_attr={"label": _escape(label), "pencolor": "black"})
            _draw_nodes(inner, opened, prefix)
            drawing.subgraph(inner)
    _draw_nodes(drawing, {name: node for name, node in nodes.items() if not node.cluster}, prefix)


def _draw_nodes(drawing: graphviz.Digraph, nodes: dict[str, SketchNode], prefix: str) -> None:
    for name, node in nodes.items():
        style = "" if node.kind == "end" else "filled,dashed" if node.backward else "filled"
        drawing.node(prefix + name, _escape(node.label), shape=SHAPES[node.kind], style=style,
                     fillcolor=SPLIT if node.split else WHOLE)


def _edge_label(edge: SketchEdge) -> str:
    """Label of an edge's collectives, on a white background that hides the lines behind it."""
    if not edge.collectives:
        return ""
    lines = "<br/>".join(f"{html.escape(kind)} x{total.count}<br/>{format_bytes(total.bytes)}"
                         for kind, total in edge.collectives.items())
    return f'<<table border="0" cellborder="0" cellpadding="1" bgcolor="white"><tr><td>{lines}</td></tr></table>>'


def _title(text: str) -> str:
    """The heading with a legend of shapes, colors and lines below it."""
    cell = '<td border="1" color="black" bgcolor="{}" width="18" height="12"></td>'
    entries = [cell.format(SPLIT) + "<td>sharded parameters</td>",
               cell.format(WHOLE) + "<td>replicated</td>",
               "<td>&#8212;&#8212;&#9656;</td><td>forward</td>", "<td>- - &#9656;</td><td>backward</td>",
               '<td><font color="firebrick">&#8212;&#8212;&#9656;</font></td>'
               "<td>collectives: how many a step, bytes a device</td>"]
    rows = ("".join(entries[:2]), "".join(entries[2:]))
    table = '<table border="0" cellborder="0" cellspacing="3" cellpadding="1"><tr>{}</tr></table>'
    legend = "".join(f"<tr><td>{table.format(row)}</td></tr>" for row in rows)
    return (f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr><td>{html.escape(text)}</td></tr>'
            f"{legend}</table>>")


def _escape(text: str) -> str:
    """Escape text for a dot label: backslashes doubled, newlines as their escape."""
    return graphviz.nohtml(graphviz.escape(text).replace("\n", "\\n"))
