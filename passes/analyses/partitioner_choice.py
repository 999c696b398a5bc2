"""Which forward values backward finds: what the partitioner that splits the rewritten graph saves of the traced one.

The decision per value (save, recompute, offload) is a later pass; this is its starting point. Rewriting changes
which bytes a rank holds of a value, hardly which values it holds.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportReturnType=false, reportAssignmentType=false
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes import compat
from passes.annotations import write
from passes.base import AnalysisPass
from passes.checkpointing.checkpoint_keys import PARTITIONER_CHOICE
from passes.graph.fx_nodes import arguments_of, constants_of
from passes.graph.graph_copy import copy_graph
from passes.graph.placement_graph import PlacementGraph, block_class
from passes.graph.step_phase import BACKWARD
from passes.op_rules.opaque_calls import port_of
from passes.op_rules.rule_table import is_random
from passes.op_rules.view_names import VIEWS, view_name
from passes.registry import register


@register
@dataclass(frozen=True)
class FindPartitionerChoice(AnalysisPass):
    """Writes `PARTITIONER_CHOICE`: what the partitioner of torch would save, of a graph that is ready to be cut."""

    name = "find_partitioner_choice"
    provides = (PARTITIONER_CHOICE,)

    forward_outputs: int = 0

    def run(self, graph_module: fx.GraphModule) -> None:
        nodes = {node.name: node for node in graph_module.graph.nodes}
        found = _partitioned(graph_module, self.forward_outputs, False)
        write(PARTITIONER_CHOICE, graph_module, frozenset(_viewed(nodes[node.name]).name for node in found
                                                          if node.name in nodes))


def _viewed(node: fx.Node) -> fx.Node:
    """What a node is a view of, itself if it is none; one of several results that a call makes stays that."""
    while view_name(node.target) in VIEWS and (
            isinstance(node.args[0].meta.get("val"), torch.Tensor) or view_name(node.args[0].target) in VIEWS):
        node = node.args[0]
    return node


def saved_values(gm: fx.GraphModule, graph: PlacementGraph, forward_outputs: int) -> frozenset[int]:
    """Indices of the values of `graph` that are held; parameters and inputs, which are there anyway, are not among them."""
    index = {value.name: value.index for value in graph.values}
    found: set[int] = set()
    for node in _partitioned(gm, forward_outputs, True):
        value = index.get(node.name)
        if value is None and (owner := port_of(node)) is not None:
            value = index.get(f"{owner[0].name}.{owner[1]}")
        if value is not None and (root := _root(graph, value)) is not None:
            found.add(root)
    numbers = _numbers(graph, gm)
    return frozenset(_where_backward_reads(graph, _alike_in_repeated_blocks(graph, found, numbers), numbers))


def _partitioned(gm: fx.GraphModule, forward_outputs: int, deduplicate: bool) -> list[fx.Node]:
    """Nodes that forward hands to backward. deduplicate: equal calls count as one. A rewritten graph has no such calls but
    those that are in backward on purpose, as where a parameter is gathered again."""
    return compat.chosen_by_min_cut(copy_graph(gm), forward_outputs, deduplicate=deduplicate)


def _root(graph: PlacementGraph, index: int) -> int | None:
    """The value whose memory a value is a view of; None if that is an input's."""
    producer = graph.values[index].producer
    while producer is not None and graph.operations[producer].kind == "view":
        index = graph.operations[producer].inputs[0]
        producer = graph.values[index].producer
    return None if producer is None else index


def _alike_in_repeated_blocks(graph: PlacementGraph, found: Iterable[int], numbers: Sequence[Hashable]) -> set[int]:
    """Of a value that each repetition of a block has, all or none, as most have it: where two cuts cost the same, the
    partitioner takes one here and the other there, and blocks that differ cannot be planned as one. A value that all
    repetitions compute from the same inputs, as a mask, is computed once, and is the first one's."""
    found, position = set(found), defaultdict(int)
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for op in graph.operations:
        if op.phase == BACKWARD:
            continue
        position[op.block] += 1
        for port, value in enumerate(op.outputs):
            alike[block_class(op.block), position[op.block], op.target, port].append(value)
    for values in alike.values():
        blocks = {graph.operations[graph.values[v].producer or 0].block for v in values}
        if len(blocks) > 1 and len({numbers[v] for v in values}) == len(values):
            held = sum(v in found for v in values)
            found.difference_update(values)
            found.update(values if 2 * held > len(values) else ())
    return found


def _where_backward_reads(graph: PlacementGraph, found: Iterable[int], numbers: Sequence[Hashable]) -> set[int]:
    """Backward may compute once more what forward has computed: the partitioner, which removes such calls, saves forward's
    value. In a graph that still has them, it is backward's value that is held, if nothing there reads the other."""
    again = {numbers[v]: v for op in graph.operations if op.phase == BACKWARD for v in op.outputs}
    return {v if _has_backward_reader(graph, v) else again.get(numbers[v], v) for v in found}


def _has_backward_reader(graph: PlacementGraph, index: int) -> bool:
    """Directly, or through views."""
    return any(
        op.phase == BACKWARD or (op.kind == "view" and any(_has_backward_reader(graph, v) for v in op.outputs))
        for op in (graph.operations[i] for i in graph.values[index].users))


def _numbers(graph: PlacementGraph, gm: fx.GraphModule) -> list[Hashable]:
    """Of each value; equal for values of equal calls of equal arguments."""
    known: dict[Hashable, int] = {}
    of_node: dict[fx.Node, int] = {}
    of_name: dict[str, int] = {}
    for node in gm.graph.nodes:
        key: Hashable = node.name
        if node.op == "call_function" and not is_random(node.target):
            key = str(node.target), constants_of(node), tuple(of_node[x] for x in arguments_of(node))
        of_name[node.name] = of_node[node] = known.setdefault(key, len(known))
    return [(of_name[value.name.partition(".")[0]], value.port) for value in graph.values]
