"""Split a backward graph in two: gradients of inputs, then the remaining gradients of weights.

The previous stage of a pipeline waits for gradients of the values that it sent. Gradients of the parameters can be computed
later, in the bubbles (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv 2401.10241).
"""
from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx
from torch.fx import GraphModule, Node

from passes.compat import OpOverload
from passes.graph.fx_nodes import WAIT, is_collective, returned_nodes
from passes.simulation.memory.storage_program import StorageProgram


def split_backward(gm: GraphModule, gradients: int) -> tuple[GraphModule | None, GraphModule | None]:
    """gm: a graph that returns `gradients` gradients, then the values to send. The first part returns the gradients that it
    computes on the way, None in place of the others; the values to send; and the values that the second part reads, by name.
    The second returns the other gradients, and None in place of those that the first returns. Views are computed again in the
    second, and other calls without gradients run where handing over takes less memory. Without values to send, there is no
    first part; without remaining gradients, no second.
    """
    results = returned_nodes(gm)
    own, sent = results[:gradients], [node for node in results[gradients:] if node is not None]
    if not sent:
        return None, gm
    first = _with_ancestors(sent, gm)
    for node in own:
        if node is not None and all(_is_view(x) for x in _made_of([node], first)):
            first |= _made_of([node], first)
    late = [None if node is None or node in first or node.op != "call_function" else node for node in own]
    wanted = [node for node in late if node is not None]
    if not wanted:
        return gm, None
    _move_smaller(gm, first, _made_of(wanted, first), wanted)
    second = _made_of(wanted, first)
    handed = _handed(gm, second, first)
    early = [None if later is not None else node for node, later in zip(own, late)]
    return (_part(gm, first, [*early, *results[gradients:], *handed]),
            _part(gm, second, late, handed))


def weight_part_last(gm: GraphModule, sent: int) -> None:
    """Move the calls of backward that the values to send do not depend on behind all others, in a joint graph that returns
    `sent` values to send last. A split backward runs them in this order."""
    (output,) = gm.graph.find_nodes(op="output")
    for node in _weight_part(gm, sent):
        output.prepend(node)


def weight_part_bytes(program: StorageProgram, gm: GraphModule, sent: int) -> int:
    """Bytes of the values that the second part of backward reads from forward or from the first part. gm: as for
    `weight_part_last`, with its storage program."""
    late = {node.name for node in _weight_part(gm, sent)}
    runs = [run for run in program.runs if run.name in late]
    made = {s for run in runs for s in run.makes}
    return program.bytes_of(frozenset(s for run in runs for s in run.reads
                                   if s not in made and program.storages[s].input_phase != "forward"))


def _weight_part(gm: GraphModule, sent: int) -> list[Node]:
    """The calls of backward that the values to send do not depend on."""
    wanted = [node for node in returned_nodes(gm)[-sent:] if node is not None] if sent else []
    first, backward, found = _with_ancestors(wanted, gm), set[Node](), list[Node]()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and "tangent" in str(node.target)) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
            if node.op == "call_function" and node not in first:
                found.append(node)
    return found


def _with_ancestors(wanted: Sequence[Node], gm: GraphModule) -> set[Node]:
    """The calls that the wanted nodes depend on, and all calls with side effects. A collective's wait stays in its part, and
    calls with several results return all of them."""
    stack = [*wanted, *(node for node in gm.graph.nodes if node.op == "call_function" and node.is_impure()
                        and not is_collective(node.target))]
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            stack += [*node.all_input_nodes, *(x for x in node.users if x.target in (operator.getitem, WAIT))]
    return found


def _made_of(wanted: Sequence[Node], there: Collection[Node]) -> set[Node]:
    """The calls that the wanted nodes depend on, excluding available ones."""
    stack, found = list(wanted), set[Node]()
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in found and node not in there:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _handed(gm: GraphModule, second: set[Node], first: Collection[Node]) -> list[Node]:
    """Values that the second part reads from the first one. Moves views of the first into the second."""
    stack, found = [x for node in second for x in node.all_input_nodes], set[Node]()
    while stack:
        node = stack.pop()
        if node not in first or node in second or node in found:
            continue
        if _is_view(node):
            second.add(node)
            stack += node.all_input_nodes
        else:
            found.add(node)
    return [node for node in gm.graph.nodes if node in found]


def _move_smaller(gm: GraphModule, first: set[Node], second: set[Node], wanted: Collection[Node]) -> None:
    """Move calls that need no gradients, such as recomputed ones, from the second part to the first where handing over a result
    takes no more memory than handing over those values that it alone is computed from. wanted: results, which stay."""
    graded: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and "tangent" in str(node.target) or not graded.isdisjoint(node.all_input_nodes):
            graded.add(node)
        if node not in second or node in graded or node in wanted or not _may_move(node):
            continue
        read = _behind_views(node)
        if any(x in second and x not in first for x in read if not _is_view(x)):
            continue  # of a call that stays
        freed = [x for x in read if x in first and not _is_view(x) and second.isdisjoint(_readers(x) - {node})]
        if freed and node.meta["val"].nbytes <= sum(x.meta["val"].nbytes for x in freed):
            first |= {node, *(x for x in read if _is_view(x))}
            second.remove(node)


def _may_move(node: Node) -> bool:
    """True for a call with one result that is not part of a collective."""
    one = isinstance(node.meta.get("val"), torch.Tensor) and not _is_view(node)
    return one and not is_collective(node.target) and node.target not in (WAIT, operator.getitem) and not node.is_impure()


def _behind_views(node: Node) -> set[Node]:
    """The calls that a call reads, views and what they are views of."""
    stack, found = list(node.all_input_nodes), set[Node]()
    while stack:
        x = stack.pop()
        if x.op == "call_function" and x not in found:
            found.add(x)
            stack += x.all_input_nodes if _is_view(x) else ()
    return found


def _readers(node: Node) -> set[Node]:
    """The calls that read a value or a view of it, without the views."""
    return {reader for user in node.users for reader in (_readers(user) if _is_view(user) else {user})}


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and bool(target.is_view) and len(node.all_input_nodes) == 1 and isinstance(
        node.meta.get("val"), torch.Tensor)


def _part(gm: GraphModule, calls: Collection[Node], returned: Sequence[Node | None],
          handed: Sequence[Node] = ()) -> GraphModule:
    """A graph of these calls. handed: its inputs in addition to those of the whole graph."""
    read = {x for node in calls for x in node.all_input_nodes} | {node for node in returned if node is not None}
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    for node in (*gm.graph.find_nodes(op="placeholder"), *handed):
        if node in read:
            new[node] = graph.placeholder(node.name)
            new[node].meta = {key: value for key, value in node.meta.items() if key in ("val", "tensor_meta", "desc")}
    for node in gm.graph.nodes:
        if node in calls or node.op == "get_attr" and node in read:
            new[node] = graph.node_copy(node, new.__getitem__)
    output = graph.output(tuple(None if node is None else new[node] for node in returned))
    output.meta["desc"] = [None] * len(returned)
    graph.lint()
    return GraphModule(gm, graph)
