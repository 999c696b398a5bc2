"""Split a graph with loop markers into the prologue, the body and the epilogue of the loop over microbatches.

Readers of a take, or of an again, are in the body, readers of collected values in the epilogue, all else in the prologue. Each
part has calls that wait for backward: those that depend on a tangent, or on a collected value that no forward output needs, as
gradients through `sign` are, which are zero whatever arrives. The body's halves stay one joint graph, partitioned like any
other; values pass between parts by node names. Calls without operands (zeros, masks), and random numbers that are computed
from a seed, are copied into each part that reads them.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalIterable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Container, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import fake_mode_of
from passes.errors import HpmlError
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE, is_collective, memory_of, with_dependencies
from passes.graph.graph_copy import copy_graph
from passes.graph.loops.loop_parts import GraphFragment, LoopInput, LoopOutput, LoopSplit, MicrobatchRows
from passes.op_rules.recomputable import is_recomputable, uses_rng
from passes.transforms.microbatch.loop_markers import ADD_UP, COLLECTS, ENTERS
from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten
PASSES = (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)
"""Values that can pass between parts: tensors, and symbolic numbers."""


class LoopPart(enum.Enum):
    BEFORE = "before"
    LOOP = "loop"
    AFTER = "after"


def restricted(segment: GraphFragment, wanted: Container[str]) -> GraphFragment:
    """The part of a fragment that computes these, and calls that must run in any case (`must_run`)."""
    if segment.gm is None:
        return segment
    gm = copy_graph(segment.gm)
    output = gm.graph.output_node()
    kept = [(name, node) for name, node in zip(segment.makes, output.args[0], strict=True) if name in wanted]
    output.args = (tuple(node for _, node in kept),)
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and not must_run(node):
            gm.graph.erase_node(node)
    reads = []
    for name, node in zip(segment.reads, gm.graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            reads.append(name)
        else:
            gm.graph.erase_node(node)
    if all(node.op != "call_function" for node in gm.graph.nodes) and not kept:
        return GraphFragment(None)
    gm.recompile()
    return GraphFragment(gm, tuple(reads), tuple(name for name, _ in kept))


def must_run(node: Node) -> bool:
    """True for a call around the loop that runs whether its result is needed or not: random numbers, so that later ones are
    unchanged, writes and unknown calls. A collective does not: all ranks that take part in it need the same results."""
    return node.op == "call_function" and not is_collective(node.target) and not is_recomputable(node)


def _is_seed(node: Node) -> bool:
    return uses_rng(node) and not node.all_input_nodes and isinstance(x := node.meta["val"], torch.Tensor) and x.numel() == 1


def split_at_markers(gm: GraphModule, forward_outputs: int) -> LoopSplit:
    return _LoopSplitter(gm, forward_outputs).run()


class _LoopSplitter:
    """part, late: for every node, its part and whether it waits for backward. constants: calls without operands, besides
    seeds."""

    def __init__(self, gm: GraphModule, forward_outputs: int):
        self.gm = gm
        self.returned = list(gm.graph.output_node().args[0])
        needed = with_dependencies([x for x in self.returned[:forward_outputs] if isinstance(x, Node)])
        self.part: dict[Node, LoopPart] = {}
        self.late: dict[Node, bool] = {}
        for node in gm.graph.nodes:
            self.late[node] = (any(self.late[x] for x in node.all_input_nodes)
                               or node.op == "placeholder" and node.name.startswith("tangents")
                               or node.target in COLLECTS and node not in needed)
            self.part[node] = self._part(node)
        self.constants: set[Node] = set()
        for node in gm.graph.nodes:
            if (node.op == "call_function" and self.part[node] is LoopPart.BEFORE and is_recomputable(node)
                    and all(x in self.constants or _is_seed(x) for x in node.all_input_nodes)):
                self.constants.add(node)

    def _part(self, node: Node) -> LoopPart:
        parts = {self.part[x] for x in node.all_input_nodes}
        if node.op == "output" or node.target in COLLECTS:
            return LoopPart.AFTER
        if node.target in ENTERS or LoopPart.LOOP in parts:
            if LoopPart.AFTER in parts:
                raise HpmlError(f"{node.name} in the loop needs what is there after it", "microbatches",
                                "this is a mistake in the pass that places operations in time")
            return LoopPart.LOOP
        return LoopPart.AFTER if LoopPart.AFTER in parts else LoopPart.BEFORE

    def run(self) -> LoopSplit:
        calls = [node for node in self.gm.graph.nodes if node.op == "call_function"]
        collects = [node for node in calls if node.target in COLLECTS]
        before, after = ([node for node in calls if self.part[node] is part and node not in set(collects)]
                         for part in (LoopPart.BEFORE, LoopPart.AFTER))
        before = [node for node in before if node not in self.constants or node in self.returned
                  or any(user.target in ENTERS for user in node.users)]
        loop = [node for node in calls if self.part[node] is LoopPart.LOOP]
        body, reads, late = self._body(loop, collects)
        forward, backward = (tuple(_collected(node) for node in collects if self.late[node] == back) for back in (False, True))
        return LoopSplit(
            self._halves(before), reads, late, forward, backward, self._halves(after),
            tuple(node.name for node in self.gm.graph.find_nodes(op="placeholder")),
            tuple(x.name if isinstance(x, Node) else None for x in self.returned), body)

    def _halves(self, nodes: Sequence[Node]) -> tuple[GraphFragment, GraphFragment]:
        early, late = ([node for node in nodes if self.late[node] == back] for back in (False, True))
        return self._segment(early), self._segment(late)

    def _segment(self, nodes: Sequence[Node]) -> GraphFragment:
        own = set(nodes)
        made = [node for node in nodes if isinstance(node.meta.get("val"), PASSES)
                and (node in self.returned or any(user not in own and user.op != "output" for user in node.users))]
        if not made:
            return GraphFragment(None)
        nodes = self._with_constants(nodes)
        own = set(nodes)
        read = _read(nodes, own)
        gm, _ = _graph(self.gm, read, nodes, made, lambda k, node: node.name)
        return GraphFragment(gm, tuple(x.name for x in read), tuple(x.name for x in made))

    def _with_constants(self, nodes: Sequence[Node]) -> list[Node]:
        own = set(nodes)
        for node in reversed(self.gm.graph.nodes):
            if node in self.constants and any(user in own for user in node.users):
                own.add(node)
        return [node for node in self.gm.graph.nodes if node in own]

    def _body(self, loop: Sequence[Node], collects: Sequence[Node]) -> tuple[GraphModule, tuple[LoopInput, ...],
                                                                             tuple[LoopInput, ...]]:
        takes = [node for node in loop if node.target in ENTERS]
        forward = with_dependencies([node.args[0] for node in collects if not self.late[node]])
        forward |= {user for node in forward for user in node.users if user.target is operator.getitem}
        # Forward before everything else: partitioners treat nodes before a forward node as computed by then.
        inside = self._with_constants([*loop, *collects])
        inside = [node for node in inside if node.target not in ENTERS and node not in collects]
        inside = [*(node for node in inside if node in forward), *self._just_in_time([x for x in inside if x not in forward])]
        ends = [node.args[0] for back in (False, True) for node in collects if self.late[node] == back]
        own = set(inside)
        read = list(dict.fromkeys((*_read(inside, own), *(x for x in ends if x not in own and x.op != "get_attr"))))
        first: dict[LoopInput, Node] = {}
        same = {node: first.setdefault(self._as_read(node), node) for node in read}  # taken twice: for forward and for backward
        read = sorted(dict.fromkeys(same.values()), key=lambda node: self.late[node])
        assert own.isdisjoint(takes)

        def name(k: int, node: Node) -> str:
            return f"tangents_{k}" if self.late[node] else f"primals_{k}"

        gm, new = _graph(self.gm, read, inside, ends, name, same)
        for node in forward.intersection(inside):  # forward has it, whichever half it was redistributed for
            if new[node].meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE:
                new[node].meta["partitioner_tag"] = "is_forward"
        self._own_memory(gm, [new[same.get(x, x)] for x in ends], sorted(self.late[x] for x in collects))
        early, late = (tuple(self._as_read(node) for node in read if self.late[node] == back) for back in (False, True))
        return gm, early, late

    def _just_in_time(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes of backward in order, but those that wait for no gradient only before their first reader: such as what backward
        computes of the values of one layer, which belongs to that layer's part of backward."""
        number = {node: k for k, node in enumerate(nodes)}
        deferred = {node for node in nodes if not self.late[node] and is_recomputable(node)
                    and any(user in number for user in node.users)}
        found: list[Node] = []
        for node in nodes:
            if node not in deferred:
                needed, stack = set[Node](), [node]
                while stack:
                    fresh = deferred.intersection(stack.pop().all_input_nodes)
                    deferred -= fresh
                    needed |= fresh
                    stack += fresh
                found += [*sorted(needed, key=number.__getitem__), node]
        return [*found, *sorted(deferred, key=number.__getitem__)]

    def _as_read(self, node: Node) -> LoopInput:
        if node.target not in ENTERS:
            return LoopInput(node.name)
        x, *rows = node.args
        return LoopInput(x.name, _rows(*rows) if rows else None)

    def _own_memory(self, gm: GraphModule, ends: Sequence[Node], late: Sequence[bool]) -> None:
        """Gradients are accumulated in place: they get memory of their own."""
        output = gm.graph.output_node()
        after_tangents: set[Node] = set()
        for node in gm.graph.nodes:
            if (node.op == "placeholder" and node.name.startswith("tangents")) or any(
                    x in after_tangents for x in node.all_input_nodes):
                after_tangents.add(node)
        taken = {memory_of(node) for node in gm.graph.nodes
                 if node.op in ("placeholder", "get_attr") or node not in after_tangents}
        first = next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
        results = []
        for end, back in zip(ends, late, strict=True):
            if end.op != "call_function" or (back and memory_of(end) in taken):
                insert = CallInserter(gm.graph, output if back else first, like=end, fake_mode=fake_mode_of(gm))
                end = insert(aten.clone.default, end)
                end.meta["partitioner_tag"] = "is_backward" if back else "is_forward"
            taken.add(memory_of(end))
            results.append(end)
        output.args = (tuple(results),)
        gm.recompile()


def _rows(apart: Sequence[int], dim: int, size: Sequence[int]) -> MicrobatchRows:
    return MicrobatchRows(tuple(apart), dim, tuple(size))


def _collected(node: Node) -> LoopOutput:
    x, *rows = node.args
    return LoopOutput(node.name, None if node.target is ADD_UP else _rows(*rows), x.meta["val"])


def _read(nodes: Sequence[Node], own: Container[Node]) -> list[Node]:
    """Operands from outside, in order; constants come along."""
    return list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in own and x.op != "get_attr"))


def _graph(gm: GraphModule, read: Sequence[Node], nodes: Sequence[Node], made: Sequence[Node],
           name: Callable[[int, Node], str], same: dict[Node, Node] | None = None) -> tuple[GraphModule, dict[Node, Node]]:
    """These nodes as a separate graph; also: node -> its copy. same: node that is read -> the one that stands for it."""
    graph, new = Graph(), {}
    for k, node in enumerate(read):
        assert isinstance(node.meta.get("val"), PASSES), f"{node}, no tensor and no number, cannot be handed on"
        new[node] = graph.placeholder(name(k, node))
        new[node].meta["val"] = node.meta["val"]
    for node, first in (same or {}).items():
        new[node] = new[first]

    def copy(node: Node) -> Node:
        if node not in new:
            assert node.op == "get_attr", f"{node} is read before it is made"
            new[node] = graph.node_copy(node)
        return new[node]

    for node in nodes:
        for x in node.all_input_nodes:
            copy(x)
        new[node] = graph.node_copy(node, copy)
    graph.output(tuple(copy(node) for node in made))
    graph.lint()
    return GraphModule(gm, graph), new
