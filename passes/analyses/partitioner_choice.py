"""Forward values saved for backward: the choice of the partitioner that splits the rewritten graph, on the traced one.

Save, recompute and offload decisions are made by later passes; this is their starting point. Rewriting changes
the bytes of a value on a rank, hardly which values are saved.
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
from passes.graph.fx_nodes import arguments_of, constants_of, returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.graph.placement_graph import PlacementGraph, block_class
from passes.graph.step_phase import BACKWARD
from passes.op_rules.opaque_calls import port_of
from passes.op_rules.rule_table import is_random, operator_of
from passes.registry import register


@register
@dataclass(frozen=True)
class FindPartitionerChoice(AnalysisPass):
    """Writes `PARTITIONER_CHOICE`: the values that torch's partitioner would save, of a graph ready to be partitioned."""

    name = "find_partitioner_choice"
    provides = (PARTITIONER_CHOICE,)

    forward_outputs: int = 0

    def run(self, graph_module: fx.GraphModule) -> None:
        nodes = {node.name: node for node in graph_module.graph.nodes}
        # In a rewritten graph, equal calls are intentional, such as a second gather of a parameter in backward.
        found = compat.chosen_by_min_cut(copy_graph(graph_module), self.forward_outputs, deduplicate=False)
        write(PARTITIONER_CHOICE, graph_module, frozenset(_viewed(nodes[node.name]).name for node in found
                                                          if node.name in nodes))


def _viewed(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, itself if it is none; an element of a tuple stays that element."""
    while operator_of(node.target).view and (
            isinstance(node.args[0].meta.get("val"), torch.Tensor) or operator_of(node.args[0].target).view):
        node = node.args[0]
    return node


def saved_values(gm: fx.GraphModule, graph: PlacementGraph, forward_outputs: int) -> frozenset[int]:
    """Indices of the saved values of `graph`, without parameters and inputs, which are in memory anyway."""
    index = {value.name: value.index for value in graph.values}
    found: set[int] = set()
    for node in compat.chosen_by_min_cut(_up_to_backward(gm, forward_outputs), forward_outputs, deduplicate=True):
        value = index.get(node.name)
        if value is None and (owner := port_of(node)) is not None:
            value = index.get(f"{owner[0].name}.{owner[1]}")
        if value is not None and (root := _root(graph, value)) is not None:
            found.add(root)
    numbers = _numbers(graph, gm)
    return frozenset(_where_backward_reads(graph, _alike_in_repeated_blocks(graph, found, numbers), numbers))


def _up_to_backward(gm: fx.GraphModule, forward_outputs: int) -> fx.GraphModule:
    """A copy for the partitioner with those calls on gradients alone that read forward values, too: on a tangent in place of
    gradients, and returned as if they were some. The others have no part in its choice, and are a third of a graph."""
    graph, copies, gradients = fx.Graph(), dict[fx.Node, fx.Node](), set[fx.Node]()
    tangent = next((x for x in gm.graph.find_nodes(op="placeholder") if "tangents" in str(x.target)), None)
    output = gm.graph.output_node()
    for node in gm.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "placeholder" and "tangents" in str(node.target) or not gradients.isdisjoint(operands):
            gradients.add(node)
        if node is not output and (node.op == "placeholder" or node not in gradients or not gradients.issuperset(operands)):
            copies[node] = graph.node_copy(node, lambda x: copies[tangent if x in gradients else x])
    returned = returned_nodes(gm)
    read = [copy for x, copy in copies.items() if x in gradients and x.op != "placeholder"]
    forward = [x and copies[x] for x in returned[:forward_outputs]]
    graph.output([*forward, *(x and copies[x] for x in returned[forward_outputs:] if x not in gradients), *read])
    return compat.graph_module(gm, graph)


def _root(graph: PlacementGraph, index: int) -> int | None:
    """The value that owns the memory of a view; None if that is an input."""
    producer = graph.values[index].producer
    while producer is not None and graph.operations[producer].kind == "view":
        index = graph.operations[producer].inputs[0]
        producer = graph.values[index].producer
    return None if producer is None else index


def _alike_in_repeated_blocks(graph: PlacementGraph, found: Iterable[int], numbers: Sequence[Hashable]) -> set[int]:
    """For corresponding values of repeated blocks, save all or none, by majority: where two cuts cost the same, the
    partitioner may choose differently per block, and blocks that differ cannot be folded. A value that all
    repetitions compute from the same inputs, such as a mask, is computed once, by the first block."""
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
    """Backward may recompute a forward value: the partitioner, which merges such calls, saves forward's
    value. In a graph that still has both, backward's value is the saved one, if nothing in backward reads the other."""
    again = {numbers[v]: v for op in graph.operations if op.phase == BACKWARD for v in op.outputs}
    return {v if _has_backward_reader(graph, v) else again.get(numbers[v], v) for v in found}


def _has_backward_reader(graph: PlacementGraph, index: int) -> bool:
    """Directly, or through views."""
    return any(
        op.phase == BACKWARD or (op.kind == "view" and any(_has_backward_reader(graph, v) for v in op.outputs))
        for op in (graph.operations[i] for i in graph.values[index].users))


def _numbers(graph: PlacementGraph, gm: fx.GraphModule) -> list[Hashable]:
    """A key of each value; equal for values of equal calls with equal arguments."""
    known: dict[Hashable, int] = {}
    of_node: dict[fx.Node, int] = {}
    of_name: dict[str, int] = {}
    for node in gm.graph.nodes:
        key: Hashable = node.name
        if node.op == "call_function" and not is_random(node.target):
            key = str(node.target), constants_of(node), tuple(of_node[x] for x in arguments_of(node))
        of_name[node.name] = of_node[node] = known.setdefault(key, len(known))
    return [(of_name[value.name.partition(".")[0]], value.port) for value in graph.values]
