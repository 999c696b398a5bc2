"""Split a Dynamo graph: large outputs beside the loss move to a graph of their own, which computes them from smaller values.

A model that returns its loss along with logits holds the logits until the step ends, and autograd makes zeros of their size as
their missing gradient. Most loops read the loss alone. After the split, the first graph returns the hidden states that the
logits are computed from, which are saved for backward anyway; their gradient has their size.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.annotations import Key, has, read, write
from passes.compat import HigherOrderOperator, graph_module, has_effects, size_hint
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.graph.graph_copy import copy_graph

LEAST_BYTES = 1 << 20
"""Outputs below this size stay: computing them later would cost more than it saves."""
LEAST_GAIN = 1.5
"""Outputs stay unless they are larger than what computing them later keeps alive by this factor."""
COPIED_BYTES: Key[int] = Key("copied_bytes", int, scope="graph")
"""Bytes of the inputs of a graph that are copied where its outputs are not read before these change."""
_MOST_CALLS = 16
_HEAVY = frozenset(("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "bilinear", "__matmul__", "conv1d", "conv2d",
                    "conv3d", "scaled_dot_product_attention"))
_CONTEXTS = frozenset(("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
                       "_exit_inference_mode"))


@dataclass(frozen=True)
class OutputSplit:
    """whole: the graph before the split. rest: the graph that was split off, which takes the results of the first graph at
    `sources`, and the inputs of the original at `takes`. added: number of results that the first graph has at its end, and the
    original had not. places: for each output of the original that is missing in the first graph, its position and that of the
    result of `rest`; several outputs may be one result."""

    whole: GraphModule
    rest: GraphModule
    places: tuple[tuple[int, int], ...]
    sources: tuple[int, ...]
    added: int
    takes: tuple[int, ...]


def split_outputs(gm: GraphModule) -> OutputSplit | None:
    """Split large outputs off a Dynamo graph that returns a scalar loss. gm: changed to return its other outputs, in order, and
    then the sources of the rest. Returns None, and leaves the graph unchanged, where nothing is gained or it is not safe."""
    results = returned_nodes(gm)
    if not any(_is_loss(node) for node in results):
        return None
    order = {node: k for k, node in enumerate(gm.graph.nodes)}
    cuts: dict[Node, set[Node]] = {}
    for node in dict.fromkeys(results):
        if node is not None and not _is_loss(node) and _bytes(node) >= LEAST_BYTES:
            cut = _cheapest_cut(node)
            if cut is not None:
                cuts[node] = cut
    if not cuts:
        return None
    sources = sorted(set().union(*cuts.values()), key=order.__getitem__)
    inside = sorted(set().union(*(_between(node, cut) for node, cut in cuts.items())), key=order.__getitem__)
    kept = sum(map(_bytes, sources))
    if sum(map(_bytes, cuts)) < LEAST_GAIN * kept or not _is_safe(gm, sources, inside):
        return None
    rest = _graph_of(gm, sources, inside, list(cuts))
    if not _is_pure(rest):
        return None
    inputs = [node for node in sources if node.op == "placeholder"]
    computed = [node for node in sources if node.op != "placeholder"]
    placeholders = {node: k for k, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    whole, results_of_rest = copy_graph(gm), list(cuts)
    places = tuple((k, results_of_rest.index(node)) for k, node in enumerate(results) if node in cuts)
    returned: Any = gm.graph.output_node().args[0]
    stay = [x for x in returned if x not in cuts]
    results = [*stay, *(node for node in computed if node not in stay)]
    gm.graph.output_node().args = (tuple(results),)
    for node in reversed(inside):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    write(COPIED_BYTES, gm, sum(map(_bytes, inputs)))
    return OutputSplit(whole, rest, places, tuple(map(results.index, computed)), len(results) - len(stay),
                       tuple(placeholders[node] for node in inputs))


def copied_bytes(gm: GraphModule) -> float:
    """Bytes of the inputs that are copied for outputs that were split off this graph."""
    return float(read(COPIED_BYTES, gm)) if has(COPIED_BYTES, gm) else 0.0


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _is_loss(node: Node | None) -> bool:
    value = node is not None and _value(node)
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point() and value.requires_grad


def _bytes(node: Node) -> int:
    """Bytes of a node's tensor; 0 for anything else."""
    value, count = _value(node), 1
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    for size in value.shape:
        count *= size_hint(size, unbacked=0)
    return count * value.element_size()


def _cheapest_cut(node: Node) -> set[Node] | None:
    """The values of fewest bytes, inputs of the graph included, that a short chain of calls, at most one of them a matrix
    product, computes an output from. None if the output itself has the fewest."""
    current, best, heavy = {node}, None, 0
    least = _bytes(node)
    for _ in range(_MOST_CALLS):
        largest = max((x for x in current if x.op != "placeholder"), key=_bytes, default=None)
        if largest is None or largest.op not in ("call_function", "call_method") or _writes(largest):
            break
        heavy += _name(largest) in _HEAVY
        if heavy > 1 or isinstance(largest.target, HigherOrderOperator):
            break
        current = (current - {largest}) | set(largest.all_input_nodes)
        if any(x.op == "get_attr" for x in current):
            break
        total = sum(map(_bytes, current))
        same = best is not None and total == least and _is_view(largest)  # of two tensors over one memory, the whole one
        if (total < least or same) and all(isinstance(_value(x), torch.Tensor) or x.op == "placeholder" for x in current):
            best, least = set(current), total
    return best


def _between(node: Node, cut: set[Node]) -> set[Node]:
    """The calls that compute a node from a cut."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each not in cut and each not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return found


def _is_view(node: Node) -> bool:
    return memory_of(_value(node)) in {memory_of(_value(x)) for x in node.all_input_nodes}


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _writes(node: Node) -> bool:
    """True if a call may write to a tensor, judged by its name."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    name, builtin = _name(node), getattr(node.target, "__module__", "") == "_operator"
    if builtin:
        return name in ("setitem", "delitem") or name.startswith("i") and hasattr(operator, f"__{name}__") and name not in (
            "index", "inv", "invert")
    if "out" in node.kwargs or node.kwargs.get("inplace") or _in_place_by_position(node):
        return True
    if name in ("batch_norm", "instance_norm", "__setitem__", "set_data"):  # the first two write running statistics
        return True
    return name.startswith("__i") or name.endswith("_") and not name.endswith("__")


def _in_place_by_position(node: Node) -> bool:
    """True if `inplace` is given as a positional argument, as modules such as nn.Dropout and nn.SELU do."""
    try:
        names = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):  # a method's name, or a function of C++, which has no such parameter
        return False
    return "inplace" in names and any(node.args[names.index("inplace"):][:1])


def _is_safe(gm: GraphModule, sources: Sequence[Node], inside: Sequence[Node]) -> bool:
    """True if these calls give the same later on as where they stand: nothing that follows their sources writes in place, and
    they run in the mode that the graph is called in."""
    nodes = list(gm.graph.nodes)
    order = {node: k for k, node in enumerate(nodes)}
    begins = min(order[node] for node in (*sources, *inside) if node.op != "placeholder")
    runs = [order[node] for node in inside]
    data = [node for node in sources if node.op == "placeholder" and not isinstance(_value(node), torch.nn.Parameter)]
    if any(_writes(node) or isinstance(node.target, HigherOrderOperator) for node in nodes[0 if data else begins:]):
        return False
    grad, autocasts = True, 0
    for node in nodes[:max(runs)]:
        name = _name(node)
        if name in _CONTEXTS and order[node] > min(runs):
            return False
        if name == "_set_grad_enabled":
            grad = node.args[0] is True
        elif name in _CONTEXTS:
            autocasts += -1 if name.startswith("_exit") else 1
    return grad and autocasts == 0


def _graph_of(gm: GraphModule, sources: Sequence[Node], inside: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    graph, made = Graph(), {}
    ordered = [*(x for x in sources if x.op != "placeholder"), *(x for x in sources if x.op == "placeholder")]
    for node in ordered:
        made[node] = graph.placeholder(node.name)
        made[node].meta.update(node.meta)
    for node in inside:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in results))
    return graph_module(gm, graph)


def _is_pure(rest: GraphModule) -> bool:
    """True if a graph, run on the fakes of its inputs, writes nothing, draws nothing, and returns memory of its own."""
    inputs = [_value(node) for node in rest.graph.find_nodes(op="placeholder")]
    mode = next((x.fake_mode for x in inputs if hasattr(x, "fake_mode")), None)
    with mode or torch.no_grad(), torch.no_grad():
        results, effects = has_effects(lambda: rest(*inputs))
    given = {memory_of(x) for x in inputs}
    return not effects and not any(memory_of(x) in given for x in results)
