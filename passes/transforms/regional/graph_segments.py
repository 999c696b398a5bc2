"""Cut a graph that is ready for compilation into segments, so that equal ones, such as a model's layers, are compiled once.

A segment is a separate graph: its inputs are the values it reads from outside, its outputs those read after it. Two are
equal if their calls, their wiring, and the sizes and strides of their inputs are. A collective whose wait is
outside its segment, and that wait, run between segments as single calls; so do writes into inputs.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportUnhashable=false
from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from passes import compat
from passes.graph.fx_nodes import WAIT, arguments_of, constants_of, is_collective, memory_of, returned_nodes
from passes.op_rules.rule_table import operator_of
from passes.transforms.regional.repeated_regions import described, repetition_cuts

LOOK_UP = "prims.inductor_lookup_seed.default"
"""By name: inductor registers it when it is loaded."""


@dataclass(frozen=True)
class GraphSegment:
    """Consecutive calls, their inputs and outputs. alone: a single call that is not compiled. donated: indices of inputs that
    are dead after the segment and alias nothing: results may reuse their memory."""

    nodes: tuple[Node, ...]
    takes: tuple[Node, ...]
    gives: tuple[Node, ...]
    calls: Hashable
    alone: bool = False
    donated: tuple[int, ...] = ()

    @property
    def key(self) -> Hashable:
        """Equal for equal segments."""
        return self.calls, self.donated

    def graph(self, whole: GraphModule) -> GraphModule:
        """The segment as a graph with canonical node names."""
        graph, new = fx.Graph(), {}
        for k, node in enumerate(self.takes):
            # Caches of compiled code hash the text of a graph, which must include the donated inputs.
            new[node] = graph.placeholder(f"donated_{k}" if k in self.donated else f"taken_{k}")
            new[node].meta["val"] = node.meta["val"]
        for k, node in enumerate(self.nodes):
            new[node] = graph.create_node(node.op, node.target, *fx.map_arg((node.args, node.kwargs), new.__getitem__),
                                          name=f"made_{k}")
            new[node].meta = dict(node.meta)
        graph.output(tuple(new[node] for node in self.gives))
        return GraphModule(whole, graph)


def cut_segments(gm: GraphModule, donated: Collection[int] = ()) -> tuple[GraphSegment, ...] | None:
    """The segments of a graph in order; None if nothing repeats, or if the graph cannot be cut.

    donated: indices of the graph's inputs that are dead after it.
    """
    if not all(map(_can_be_cut, gm.graph.nodes)):
        return None
    _gather_ports(gm.graph)
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    at = repetition_cuts(nodes)
    if not at:
        return None
    spans = [nodes[a:b] for a, b in zip([0, *at], [*at, len(nodes)]) if b > a]
    returned = {node for node in returned_nodes(gm) if node is not None}
    segments = [_segment(part, alone, returned) for span in spans for part, alone in _parts(span)]
    return tuple(_donating(gm, segments, returned, donated))


def _can_be_cut(node: Node) -> bool:
    """True if all operands and results are tensors of static sizes, and the only mutation is of a whole input."""
    if node.op not in ("placeholder", "call_function"):
        return node.op == "output"
    values = node.meta.get("val")
    for x in values if isinstance(values, (tuple, list)) else [values]:
        if x is not None and not (isinstance(x, torch.Tensor) and all(isinstance(n, int) for n in (*x.shape, *x.stride()))):
            return False
    if node.op == "placeholder" or node.target is operator.getitem:
        return True
    if not isinstance(node.target, compat.OpOverload):
        return False
    return not node.target._schema.is_mutable or _writes_input(node)


def _writes_input(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], Node) and node.args[0].op == "placeholder"


def _gather_ports(graph: fx.Graph) -> None:
    """Move getitems, and single seeds, directly after the call whose result they select, or after the inputs."""
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.target is operator.getitem or str(node.target) == LOOK_UP:
            source = node.args[0]
            if isinstance(source, Node):
                last = source if source.op == "call_function" else last_input[0]
                while last.next.op == "call_function" and last.next.args and last.next.args[0] is source and (
                        last.next.target is node.target) and last.next is not node:
                    last = last.next
                if last.next is not node:
                    last.append(node)


def _parts(span: Sequence[Node]) -> list[tuple[list[Node], bool]]:
    """A span, cut at collectives, waits and writes that stand alone; and then again, since that may separate others from their
    waits."""
    alone = {node for node in span if _writes_input(node)}
    while True:
        found: list[tuple[list[Node], bool]] = [([], False)]
        for node in span:
            if node in alone:
                found += [([node], True), ([], False)]
            else:
                found[-1][0].append(node)
        more = {node for part, _ in found for node in part if node not in alone and _stands_alone(node, set(part))}
        if not more:
            return [(part, single) for part, single in found if part]
        alone |= more


def _stands_alone(node: Node, inside: set[Node]) -> bool:
    """inside: the calls that it would be compiled with."""
    if node.target is operator.getitem:
        return is_collective(node.args[0].target) and not {node.args[0], *node.users} <= inside
    if node.target is WAIT:
        return not set(_begun(node)) <= inside
    return is_collective(node.target) and not all(
        user in inside and (user.target is not operator.getitem or set(user.users) <= inside) for user in node.users)


def _begun(wait: Node) -> list[Any]:
    """The collective that is waited for, through the list of its results."""
    source = wait.args[0]
    return [source, source.args[0]] if source.target is operator.getitem else [source]


def _segment(nodes: Sequence[Node], alone: bool, returned: set[Node]) -> GraphSegment:
    inside = {node: k for k, node in enumerate(nodes)}
    takes: dict[Node, int] = {}
    told: list[Hashable] = []
    for node in nodes:
        reads = []
        for x in arguments_of(node):
            reads.append(("made", inside[x]) if x in inside else ("taken", takes.setdefault(x, len(takes))))
        told.append((node.target, constants_of(node), tuple(reads), described(node.meta.get("val"))))
    gives = [node for node in nodes if node in returned or any(user not in inside for user in node.users)]
    key = tuple(told), tuple(described(x.meta["val"]) for x in takes), tuple(inside[node] for node in gives)
    return GraphSegment(tuple(nodes), tuple(takes), tuple(gives), key, alone)


def _donating(gm: GraphModule, segments: Sequence[GraphSegment], returned: set[Node],
              donated: Collection[int]) -> list[GraphSegment]:
    needed: set[int | None] = {None}
    for k, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if k not in donated:
            needed |= _memory(node)
    for node in returned:
        needed |= _memory(node)
    found = []
    for segment in reversed(segments):
        taken = [_memory(node) for node in segment.takes]
        free = tuple(k for k, memory in enumerate(taken) if not memory & needed and not any(
            memory & other for j, other in enumerate(taken) if j != k)) if not segment.alone else ()
        needed.update(*taken)
        found.append(replace(segment, donated=free))
    return found[::-1]


def _memory(node: Node) -> set[int | None]:
    """Storages that a value may use: its own, and those of the tensors that it is a view of, even if traced separately."""
    found = {memory_of(node)}
    while node.op == "call_function" and node.all_input_nodes and (
            node.target is WAIT or node.target is operator.getitem or operator_of(node.target).view):
        node = node.all_input_nodes[0]
        values = node.meta.get("val")
        found |= {memory_of(x) for x in values} if isinstance(values, (tuple, list)) else {memory_of(values)}
    return found if len(found) == 1 else found - {None} or {None}
