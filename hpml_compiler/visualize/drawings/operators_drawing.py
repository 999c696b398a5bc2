"""All operators of a plan: a cluster for each opened class of modules, a node for each other one."""
from __future__ import annotations

import html

import graphviz

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.visualize.description.describe_plan import describe
from hpml_compiler.visualize.description.module_classes import ModuleClass, module_classes
from hpml_compiler.visualize.drawings.labels import FONT, SPLIT, WHOLE_COLOR, axis_colors, heading
from hpml_compiler.visualize.drawings.plan_sketch import INPUTS, Sketch, SketchEdge, SketchNode, sketch
from hpml_compiler.visualize.formatting import format_bytes, format_place, format_us
from hpml_compiler.visualize.plan_table import describe_memory, describe_solver
from passes.errors import BadInput

MANY = 150
"""Nodes from which lines are straight, and pass behind boxes."""
SHAPES = {"block": "box3d", "operation": "box", "parameter": "ellipse", "end": "plaintext"}


def draw_operators(plan: PlanContent, expanded: bool, names: set[str], max_nodes: int) -> graphviz.Digraph:
    """expanded: open every class; names: of the classes to open otherwise. Stages are not drawn: modules are, each once."""
    graphs = [graph.model_copy(update={"pipeline": None}) for graph in plan.graphs]
    all_classes = [module_classes(graph) for graph in graphs]
    if unknown := {name for name in names if not any(_is_named(each, {name}) for part in all_classes for each in part)}:
        raise unknown_module(plan, unknown, "graphviz(expand=...)")
    # margins larger than the difference in text width between the fonts of different viewers
    drawing = graphviz.Digraph("plan", graph_attr=FONT | {"labelloc": "t", "nodesep": "0.7", "pad": "0.2", "labeljust": "l",
                                                          "outputorder": "edgesfirst"},  # so that no line crosses a box's text
                               node_attr=FONT | {"margin": "0.22,0.1"}, edge_attr=FONT)
    drawing.attr(label=heading(describe(plan), format_place(plan.mesh, plan.world_size, plan.cluster), [LEGEND]))
    nodes = 0
    for position, (graph, classes) in enumerate(zip(graphs, all_classes, strict=True)):
        opened = {each.name for each in classes if expanded or _is_named(each, names)}
        found = sketch(graph, classes, opened, max(1, max_nodes // len(graphs)))
        title = (f"{graph.name}: {format_us(graph.predicted.step_time_us)} a step ({describe_solver(graph.solver)})\n"
                 f"{describe_memory(graph.memory, graph.at_peak)}")
        inner = graphviz.Digraph(f"cluster_g{position}")
        # a frame separates several graphs; around a single graph it would only cut through edge labels
        inner.attr(pencolor="gray" if len(graphs) > 1 else "transparent")
        _draw(inner, found, f"g{position}_", title, axis_colors(plan.mesh))
        drawing.subgraph(inner)
        nodes += len(found.nodes)
    if nodes > MANY:  # curves around boxes and the last refinements of places take seconds
        drawing.attr(splines="line", nslimit="5")
    return drawing


def unknown_module(plan: PlanContent, unknown: set[str], where: str) -> BadInput:
    known = dict.fromkeys(each.name for graph in plan.graphs for each in module_classes(graph))
    return BadInput(what=f"the plan has no block {', '.join(sorted(unknown))}", where=where,
                    next_step=f"the blocks are {', '.join(known)}")


def _is_named(each: ModuleClass, names: set[str]) -> bool:
    return each.name in names or any(block.path in names for block in each.blocks)


def _draw(drawing: graphviz.Digraph, found: Sketch, prefix: str, title: str, colors: dict[str, str]) -> None:
    """Add the nodes and edges of one graph to the drawing."""
    drawing.attr(label=_escape(title), margin="24")
    for index, (cluster, label) in enumerate(found.clusters.items()):
        opened = {name: node for name, node in found.nodes.items() if node.cluster == cluster}
        if opened:
            inner = graphviz.Digraph(f"cluster_{prefix}{index}", graph_attr={"label": _escape(label), "pencolor": "black"})
            _draw_nodes(inner, opened, prefix)
            drawing.subgraph(inner)
    _draw_nodes(drawing, {name: node for name, node in found.nodes.items() if not node.cluster}, prefix)
    if found.left_out:
        total = found.left_out + sum(node.kind != "end" for node in found.nodes.values())
        drawing.node(f"{prefix}left_out", _escape(f"the {found.left_out} cheapest of {total} nodes are not drawn"),
                     shape="plaintext")
    rank = {name: position for position, name in enumerate(found.nodes)}
    # edges with labels last, so that no other line is drawn over a label
    for (tail, head), edge in sorted(found.edges.items(), key=lambda pair: bool(pair[1].collectives)):
        # a backward-pointing edge, as from a block's last operation to the next block's first, must not affect Graphviz's ranks
        forward = rank[tail] < rank[head] or tail == INPUTS
        color = colors.get(edge.axes[0], "firebrick") if edge.axes else "firebrick"
        drawing.edge(prefix + tail, prefix + head, label=_edge_label(edge), constraint=str(forward).lower(),
                     style="dashed" if edge.backward else "solid",
                     color="gray" if edge.order else color if edge.collectives else "black")


def _draw_nodes(drawing: graphviz.Digraph, nodes: dict[str, SketchNode], prefix: str) -> None:
    for name, node in nodes.items():
        style = "" if node.kind == "end" else "filled,dashed" if node.backward else "filled"
        drawing.node(prefix + name, _escape(node.label), shape=SHAPES[node.kind], style=style,
                     fillcolor=SPLIT if node.split else WHOLE_COLOR)


def _edge_label(edge: SketchEdge) -> str:
    """Label of an edge's collectives, on a white background that hides the lines behind it."""
    if not edge.collectives:
        return ""
    over = f" over {', '.join(edge.axes)}" if edge.axes else ""
    lines = "<br/>".join(f"{html.escape(kind + over)} x{total.count}<br/>{format_bytes(total.bytes)}"
                         for kind, total in edge.collectives.items())
    return f'<<table border="0" cellborder="0" cellpadding="1" bgcolor="white"><tr><td>{lines}</td></tr></table>>'


def _legend() -> str:
    """Shapes, colors and lines."""
    cell = '<td border="1" color="black" bgcolor="{}" width="18" height="12"></td>'
    entries = [cell.format(SPLIT) + "<td>sharded</td>", cell.format(WHOLE_COLOR) + "<td>whole</td>",
               "<td>&#8212;&#8212;&#9656;</td><td>forward</td>", "<td>- - &#9656;</td><td>backward</td>",
               "<td>in color</td><td>collectives: how many a step, bytes a device</td>"]
    return f'<table border="0" cellborder="0" cellspacing="3" cellpadding="1"><tr>{"".join(entries)}</tr></table>'


def _escape(text: str) -> str:
    """Escape text for a dot label: backslashes doubled, newlines as their escape."""
    return graphviz.nohtml(graphviz.escape(text).replace("\n", "\\n"))


LEGEND = _legend()
