"""Nodes and edges of a drawn plan as plain data, which operators_drawing.py draws.

A class of equal blocks is one node or, if opened, a cluster with the operations and parameters of its first block. Edges
are reads, with the collectives between the two ends; they come from `OperationPlan.sources` and the redistributions.
If no sources are known, gray edges in the order of execution connect the nodes.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from hpml_compiler.plans.schema import CollectiveTotal, GraphPlan, ParameterPlan, Redistribution, collective_totals
from hpml_compiler.visualize.description.module_classes import ModuleClass, PlanBlock
from hpml_compiler.visualize.description.module_summaries import module_summary
from hpml_compiler.visualize.description.placement_words import value_words, words_text
from hpml_compiler.visualize.formatting import format_bytes, format_collectives, format_count, format_us

INPUTS, OUTPUTS = "inputs", "outputs"
Pair = tuple[str, str]  # tail, head


@dataclass(frozen=True)
class SketchNode:
    """A node of the drawing. kind: "block", "operation", "parameter" or "end" (inputs, outputs). cluster: the opened class that
    it belongs to."""

    label: str
    kind: str
    cluster: str = ""
    split: bool = False
    backward: bool = False


@dataclass(frozen=True)
class SketchEdge:
    """An edge of the drawing. backward: only backward operations read along it. order: order of execution, nothing is read.
    axes: of the collectives."""

    collectives: dict[str, CollectiveTotal] = field(default_factory=dict)
    backward: bool = False
    order: bool = False
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sketch:
    """A plan's drawing: nodes by identifier, edges by pairs of identifiers, and the label of each opened class (`clusters`)."""

    nodes: dict[str, SketchNode]
    edges: dict[Pair, SketchEdge]
    clusters: dict[str, str]
    left_out: int


def sketch(graph: GraphPlan, classes: list[ModuleClass], opened: Collection[str], max_nodes: int) -> Sketch:
    """Choose at most `max_nodes` nodes (first those next to redistributions, then the most expensive), with their edges."""
    nodes, homes, costs = _nodes(graph, classes, opened)
    kept = set(sorted(nodes, key=lambda node: costs[node], reverse=True)[:max_nodes])
    moves, backward = _reads(graph, {name: home for name, home in homes.items() if home in kept})
    edges = {pair: SketchEdge(collective_totals(moves.get(pair, ())), only, axes=_axes(moves.get(pair, ())))
             for pair, only in backward.items()}
    inside = {tail: edge.collectives for (tail, head), edge in edges.items() if tail == head and edge.collectives}
    edges = {pair: edge for pair, edge in edges.items() if pair[0] != pair[1]}
    drawn = {name: _with_inside(node, inside.get(name)) for name, node in nodes.items() if name in kept}
    ends = {end: SketchNode(end, "end") for end in (INPUTS, OUTPUTS) if any(end in pair for pair in edges)}
    if not any(operation.sources for operation in graph.operations.values()):
        order = list(dict.fromkeys(homes[name] for name in graph.operations if homes[name] in kept))
        edges = {pair: SketchEdge(order=True) for pair in zip(order, order[1:], strict=False)} | edges
    clusters = {each.name: block_label(graph, each) for each in classes if each.name in opened}
    return Sketch(drawn | ends, edges, clusters, len(nodes) - len(kept))


def _axes(moves: Iterable[Redistribution]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hop.axis for move in moves for hop in move.hops if hop.bytes))


def block_label(graph: GraphPlan, each: ModuleClass) -> str:
    """Label of a class of equal modules: name, how many, parameters and times."""
    found = module_summary(graph, each, {})
    lines = [found.name + (f" x{found.count}" if found.count > 1 else "")]
    if found.parameter_count:
        lines.append(f"{format_count(found.parameter_count)} parameters, {format_bytes(found.parameter_bytes)} a device")
    lines.append(f"compute {format_us(found.compute_us)}")
    if found.communication_us >= 0.005:  # less would be displayed as 0.00
        lines.append(f"communication {format_us(found.communication_us)}")
    return "\n".join(lines)


def _nodes(graph: GraphPlan, classes: list[ModuleClass], opened: Collection[str]
           ) -> tuple[dict[str, SketchNode], dict[str, str], dict[str, tuple[bool, float]]]:
    """All nodes, the node that shows each operation and parameter of the graph, and the sort key (cost) of each node."""
    moved = {name for move in graph.redistributions for name in (move.value, move.consumer)}
    nodes: dict[str, SketchNode] = {}
    homes: dict[str, str] = {}
    costs: dict[str, tuple[bool, float]] = {}
    for index, each in enumerate(classes):
        first = each.blocks[0]
        if each.name not in opened:
            identifier = f"block{index}"
            split = any(map(_is_split, first.parameters.values()))
            nodes[identifier] = SketchNode(block_label(graph, each), "block", split=split)
            costs[identifier] = (True, sum(graph.operations[name].predicted_us * runs for name, runs in each.runs.items()))
            homes |= {name: identifier for block in each.blocks for name in (*block.parameters, *block.operations)}
            continue
        names = (*first.parameters, *first.operations)
        shown = {name: f"block{index}_{position}" for position, name in enumerate(names)}
        for name, identifier in shown.items():
            nodes[identifier] = _leaf(graph, name, each.name)
            operation = graph.operations.get(name)
            costs[identifier] = (name in moved, operation.predicted_us if operation else 0.0)
        for block in each.blocks:
            homes |= {name: shown[same] for name, same in _counterparts(block, first).items()}
    return nodes, homes, costs


def _counterparts(block: PlanBlock, first: PlanBlock) -> dict[str, str]:
    """Names in `first` that represent those in `block`: parameters by name, operations by position if the counts are equal."""
    start = len(block.path)
    same = {first.path + name[start:] for name in block.parameters}
    pairs = {name: first.path + name[start:] for name in block.parameters if same <= set(first.parameters)}
    if len(block.operations) == len(first.operations):
        pairs |= dict(zip(block.operations, first.operations, strict=True))
    return pairs


def _leaf(graph: GraphPlan, name: str, cluster: str) -> SketchNode:
    if name in graph.parameters:
        parameter = graph.parameters[name]
        words = words_text(value_words(parameter.placements, parameter.dims, graph.mesh))
        label = f"{name}\n{parameter.dtype}{list(parameter.shape)}\n{words}"
        return SketchNode(label, "parameter", cluster, _is_split(parameter))
    operation = graph.operations[name]
    dims = (*operation.dims, *[""] * len(operation.outputs))
    outputs = "; ".join(words_text(value_words(output, own, graph.mesh)) for output, own in zip(operation.outputs, dims))
    label = f"{name}\n{operation.op}\n{outputs}\n{format_us(operation.predicted_us)}"
    split = any(place != "R" for output in operation.outputs for place in output)
    return SketchNode(label, "operation", cluster, split, operation.backward)


def _is_split(parameter: ParameterPlan) -> bool:
    return any(place != "R" for place in parameter.placements)


def _reads(graph: GraphPlan, homes: dict[str, str]) -> tuple[dict[Pair, list[Redistribution]], dict[Pair, bool]]:
    """Redistributions by (tail, head), and for each edge True if only backward operations read along it.

    An operation that is not drawn passes on the nodes that it reads, so that no path is lost.
    """
    moves: dict[Pair, list[Redistribution]] = defaultdict(list)
    backward: dict[Pair, bool] = {}
    into: dict[str, list[Redistribution]] = defaultdict(list)
    for move in graph.redistributions:
        into[move.consumer if move.consumer in graph.operations else OUTPUTS].append(move)
    # filled before the loop: where one layer is listed for many, it reads its own last value
    places: dict[str, frozenset[str]] = {name: frozenset({home}) for name, home in homes.items()}

    def connect(source: str, head: str, consumer: str, is_backward: bool) -> None:
        found = [move for move in into[consumer] if move.value == source]
        listed = source in graph.operations or source in graph.parameters
        tails = places.get(source, frozenset()) if listed else frozenset({INPUTS} if found else ())
        for pair in ((tail, head) for tail in tails):
            backward[pair] = backward.get(pair, True) and is_backward
            moves[pair] += found

    for name, operation in graph.operations.items():
        sources = dict.fromkeys([*operation.sources, *(move.value for move in into[name])])
        if name not in homes:
            places[name] = frozenset().union(*(places.get(source, frozenset()) for source in sources))
            continue
        for source in sources:
            connect(source, homes[name], name, operation.backward)
    for value in dict.fromkeys(move.value for move in into[OUTPUTS]):
        connect(value, OUTPUTS, OUTPUTS, value in graph.operations and graph.operations[value].backward)
    return moves, backward


def _with_inside(node: SketchNode, inside: dict[str, CollectiveTotal] | None) -> SketchNode:
    return replace(node, label=f"{node.label}\ninside: {format_collectives(inside)}") if inside else node
