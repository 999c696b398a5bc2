"""Inline a Dynamo graph in another one, in which it is a single call."""
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from passes import compat


def inline_graph(gm: GraphModule, leaf: Callable[..., Any], inner: GraphModule, sources: Sequence[Any]) -> None:
    """Replace the call of `leaf`, whose result is a tuple, by the calls of `inner`, with their module stacks. sources: by which
    the inputs of `inner` are named."""
    (call,) = gm.graph.find_nodes(op="call_function", target=leaf)
    made: dict[Node, Any] = {}
    results: Any = ()
    with gm.graph.inserting_before(call):
        given = iter(zip(call.args, sources, strict=True))
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                made[node], source = next(given)
                if isinstance(made[node], Node) and made[node].op == "placeholder":
                    compat.name_by(made[node], source)
            elif node.op == "output":
                results = torch.fx.map_arg(node.args[0], made.__getitem__)
            else:
                made[node] = gm.graph.node_copy(node, made.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    made[node].target = _attribute(gm, inner, node.target)
    for user in list(call.users):
        assert user.target is operator.getitem, "the result of the inlined graph is a tuple"
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    gm.recompile()
    _Fakes(gm).run()


def _attribute(gm: GraphModule, inner: GraphModule, target: str) -> str:
    value: Any = inner
    for part in target.split("."):
        value = getattr(value, part)
    name = "inlined_" + target.replace(".", "_")
    setattr(gm, name, value)
    return name


class _Fakes(Interpreter):
    """Notes the fakes of all calls in the fake mode of the inputs, from whole plain ones."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        self.mode = next(mode for x in values if (mode := getattr(getattr(x, "_local_tensor", x), "fake_mode", None)))

    def run(self, *_: Any, **__: Any) -> Any:
        with compat.plain_torch_functions(), self.mode:
            return super().run()

    def run_node(self, n: Node) -> Any:
        if n.op != "placeholder":
            value = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = value
            return value
        like = n.meta["example_value"]
        if not isinstance(like, torch.Tensor):
            return like
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return made.requires_grad_(like.requires_grad)
