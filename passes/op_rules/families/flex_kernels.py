"""Sharding rules for flex attention: one operation with subgraphs that modify or mask scores.

Batch and heads can be sharded unless a subgraph reads their indices, which start at 0 on each rank. Sequence positions
are always read, so they stay whole. GQA as in `passes.op_rules.families.attention`: heads of q are `(g)(r)`, those of k and
v `(g)`.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node

from passes.compat import pytree
from passes.op_rules.base import Call, Operand, Rule, make_rule
from passes.op_rules.families.attention import attention_backward_flops, attention_flops
from passes.op_rules.rule_table import rule
from passes.pass_result import attribute_of

BEFORE_BATCH = {"score": 1, "mask": 0}
"""Inputs of a subgraph before the batch index and the head index."""


def _asks(graph: Any, kind: str) -> set[str]:
    """Which indices a subgraph reads: of the batch ("b"), of the head ("h"). Both if the subgraph is unknown."""
    owner = graph.graph.owning_module if isinstance(graph, Node) else None
    module = None if owner is None else attribute_of(owner, graph)
    if not isinstance(module, GraphModule):
        return {"b", "h"}
    placeholders = module.graph.find_nodes(op="placeholder")
    return {name for name, node in zip("bh", placeholders[BEFORE_BATCH[kind]:]) if node.users}


def _build(call: Call, like_query: tuple[int, ...], per_query: tuple[int, ...], like_key: tuple[int, ...], mask: tuple,
           asked: set[str], outputs: Mapping[int, str], backward: bool) -> Rule:
    """Build the rule. like_query, per_query (without the last dim), like_key: positions of arguments with these shapes.
    outputs: result -> q, lse or k."""
    query, key = (call.operands[call.args[i].index] for i in (0, 1))
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    sizes = {"b": batch, "g": kv_heads, "r": heads // kv_heads}
    rows = {"q": ["b", ["g", "r"], None, None], "lse": ["b", ["g", "r"], None],
            "k": ["b" if key.shape[0] == batch else None, ["g"], None, None]}
    inputs: list[list[Any]] = [[None] * len(spec.shape) for spec in call.operands]
    for role, positions in (("q", like_query), ("lse", per_query), ("k", like_key)):
        for position in positions:
            if isinstance(operand := call.args[position], Operand):
                inputs[operand.index] = rows[role]
    for operand in pytree.tree_leaves(mask):
        if isinstance(operand, Operand) and len(shape := call.operands[operand.index].shape) > 2:
            inputs[operand.index] = [rows["q"][d] if d < 2 and shape[d] == (batch, heads)[d] else None
                                     for d in range(len(shape))]
    blocked = [letter for name, letters in (("b", "b"), ("h", "gr")) if name in asked for letter in letters]
    results = [rows[outputs[i]] if i in outputs else [None] * len(spec.shape) for i, spec in enumerate(call.results)]
    return make_rule(call, inputs, results, sizes=sizes, blocked=blocked, summed=["b", "g", "r"] if backward else ())


@rule("flex_attention", heavy="attention", flops=attention_flops)
def flex_attention(call: Call) -> Rule:
    """args: query, key, value, score graph, block mask (its graph last), …"""
    asked = _asks(call.args[3], "score") | _asks(call.args[4][-1], "mask")
    return _build(call, (0,), (), (1, 2), call.args[4], asked, {0: "q", 1: "lse", 2: "lse"}, False)


@rule("flex_attention_backward", heavy="attention",
      flops=lambda q, k, v, *_, **__: attention_backward_flops(None, q, k, v))
def flex_attention_backward(call: Call) -> Rule:
    """args: query, key, value, out, logsumexp, their gradients, score graph, its backward, block mask, … Gradients of
    tensors that the subgraphs read are sums over batch and heads."""
    asked = _asks(call.args[7], "score") | _asks(call.args[8], "score") | _asks(call.args[9][-1], "mask")
    return _build(call, (0, 3, 5), (4, 6), (1, 2), call.args[9], asked, {0: "q", 1: "k", 2: "k"}, True)
