"""Find the outputs of a Dynamo graph beside its loss, and detach them: the joint graph then has no gradient for them.

AOTAutograd makes zeros for the gradient of each output that autograd sends none for, and backward adds them. Most loops send
one to the loss alone.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from passes.compat import OpOverload
from passes.graph.fx_nodes import memory_of, returned_nodes, with_dependencies

LEAST_BYTES = 1 << 16
"""Zeros below this size cost less than the call that does without them."""
LEAST_SHARE = 0.5
"""The loss is computed from at least this share of the graph's calls; a scalar that few calls make is no loss."""


def outputs_beside_loss(gm: GraphModule) -> tuple[int, ...]:
    """Positions of large results that may be detached: they have a gradient and memory of their own. None of them where no
    result is a scalar loss, or the graph changes an input that its results depend on."""
    results = returned_nodes(gm)
    losses = [node for node in results if node is not None and is_loss(node)]
    inputs = gm.graph.find_nodes(op="placeholder")
    if not _is_of_graph(gm, losses) or any(_is_written(node) and not is_statistic(node) for node in inputs):
        return ()
    memory = Counter(memory_of(_value(node)) for node in (*inputs, *results) if node is not None)
    return tuple(k for k, node in enumerate(results) if node is not None and node not in losses and _is_large(node)
                 and memory[memory_of(_value(node))] == 1)


def detach_results(gm: GraphModule, positions: Collection[int]) -> GraphModule:
    """Detach results at these positions. Returns the graph."""
    output = gm.graph.output_node()
    results = list(output.args[0])
    for k in positions:
        with gm.graph.inserting_before(output):
            made = gm.graph.call_method("detach", (results[k],))
        value = results[k].meta["example_value"]
        with value.fake_mode:
            made.meta.update(results[k].meta, example_value=value.detach())
        results[k] = made
    output.args = (tuple(results),)
    gm.recompile()
    return gm


def keep_results_as_saved(forward: GraphModule) -> GraphModule:
    """Let the forward of a joint graph return detached results as the very tensors that it saves for backward. Without a
    compiler, a script could otherwise change what is saved without autograd noticing. Returns the graph."""
    output = forward.graph.output_node()
    aliases = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

    def source(node: Node) -> Node:
        while node.target in aliases:
            node = node.all_input_nodes[0]
        return node

    before = list(output.args[0])
    results = [source(node) if isinstance(node, Node) else node for node in before]
    if any(one is not other for one, other in zip(results, before, strict=True)):
        output.args = (tuple(results),)
        for node in dict.fromkeys(before):
            if isinstance(node, Node) and not node.users:
                forward.graph.erase_node(node)
        forward.recompile()
    return forward


def without_unread_draws(backward: GraphModule) -> GraphModule:
    """Remove random operators that nothing reads, with what only they read: torch copies them from forward where Dynamo does
    not run, and they would move the generator. Returns the graph."""
    for node in reversed(backward.graph.nodes):
        if not node.users and isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            backward.graph.erase_node(node)
    backward.graph.eliminate_dead_code()
    backward.recompile()
    return backward


def is_statistic(node: Node) -> bool:
    """True for an input that the graph changes in place, and computes none of its results from, as a BatchNorm's running
    statistics in training, and the count of its calls."""
    value = _value(node)
    if not isinstance(value, torch.Tensor) or not node.users:
        return False
    if not value.is_floating_point():
        return value.dim() == 0 and all(user.target == "add_" and not user.users for user in node.users)
    return all(user.target is torch.nn.functional.batch_norm and node in user.args[1:3] and node not in user.args[3:]
               and user.args[5:6] == (True,) and user.args[0] is not node for user in node.users)


def is_loss(node: Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point() and value.requires_grad


def _value(node: Node) -> object:
    return node.meta.get("example_value")


def _is_of_graph(gm: GraphModule, losses: Sequence[Node]) -> bool:
    """True if most of the graph leads to these results."""
    calls, needed = (sum(node.op.startswith("call") for node in nodes) for nodes in (gm.graph.nodes, with_dependencies(losses)))
    return bool(losses) and needed >= LEAST_SHARE * calls


def _is_written(node: Node) -> bool:
    """True for an input that was changed in place while Dynamo traced."""
    value = _value(node)
    return isinstance(value, torch.Tensor) and value._version > 0


def _is_large(node: Node) -> bool:
    value = _value(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return False
    return value.requires_grad and value.numel() * value.element_size() >= LEAST_BYTES
