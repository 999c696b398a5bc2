"""Rules of calls: `rule_of(node)` reads the call off an FX node and asks the table of operators."""
from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import Node, map_arg

from passes.compat import depends_on_data, pytree, size_hint, static_int
from passes.op_rules.base import Call, Operand, Rule, Spec
from passes.op_rules.opaque_calls import leaves_of
from passes.op_rules.rule_table import name_of, operator_of
from passes.session_state import state_of

UNBACKED_SIZE = 8192
log = logging.getLogger("hpml")


class _FailedRules(set[tuple[Any, Any]]):
    """Operators and rules already reported as incompatible by a warning."""


def spec_of(value: Any) -> Spec:
    """Spec of a tensor (fake ones too); sizes must be numbers. One that depends on data counts as inductor counts it."""
    shape = tuple(size_hint(s, UNBACKED_SIZE) if depends_on_data(s) else int(s) for s in value.shape)
    return Spec(shape, str(value.dtype).removeprefix("torch."), value.dtype.itemsize)


def results_of(node: Node) -> list[Any]:
    """Tensors that a node returns; None entries of a tuple are dropped."""
    return [v for _, v in leaves_of(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def operand_nodes(node: Node) -> list[Node]:
    """Nodes among the arguments that stand for tensors, in the order of tree_leaves; a node may occur twice."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), lambda x: found.append(x) or x)
    return [x for x in found if isinstance(x.meta.get("val"), torch.Tensor)]


def call_of(node: Node) -> Call:
    """The call that a `call_function` node makes, with `Operand(i)` in place of its tensor arguments.

    A number that the graph computes stands there as that number if it is the same at every call, else as its node.
    """
    operands = operand_nodes(node)
    order = iter(range(len(operands)))

    def swap(x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        value = x.meta.get("val")
        if isinstance(value, torch.Tensor):
            return Operand(next(order))
        number = static_int(value)
        return x if number is None else number

    args, kwargs = pytree.tree_map(swap, (node.args, dict(node.kwargs)), is_leaf=lambda x: isinstance(x, Node))
    return Call(
        target=node.target,
        args=tuple(args),
        kwargs=kwargs,
        operands=tuple(spec_of(n.meta["val"]) for n in operands),
        results=tuple(spec_of(v) for v in results_of(node)),
        strides=tuple(tuple(n.meta["val"].stride()) for n in operands),
    )


def apply_rule(call: Call) -> Rule | None:
    """The rule of a call; None if its operator has no rule, or if the rule cannot describe the call.

    Raises whatever the rule raises, and ValueError where its letters do not fit the call.
    """
    function = operator_of(call.target).rule
    found = None if function is None else function(call)
    if not isinstance(found, (Rule, type(None))):
        raise TypeError(f"the rule returns a {type(found).__name__}, not a Rule or None")
    if found is not None and (len(found.inputs), len(found.outputs)) != (len(call.operands), len(call.results)):
        raise ValueError(f"the rule names {len(found.inputs)} operands and {len(found.outputs)} results, "
                         f"the call has {len(call.operands)} and {len(call.results)}")
    return found


def rule_of_call(call: Call) -> Rule | None:
    """The same, but a rule that raises costs nothing but the splits of its operator: a warning names it, once."""
    try:
        return apply_rule(call)
    except Exception as error:  # a rule may be a user's, and may raise anything
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)), is_leaf=lambda x: isinstance(x, Node))
        if isinstance(error, TypeError) and any(isinstance(x, Node) for x in leaves):
            return None  # it reads a number that differs from call to call
        _warn_of_rule(call, error)
        return None


def _warn_of_rule(call: Call, error: Exception) -> None:
    function = operator_of(call.target).rule
    if (call.target, function) in (failed := state_of(_FailedRules)):
        return
    failed.add((call.target, function))

    def told(x: Any) -> str:
        return f"{call.operands[x.index].dtype}{list(call.operands[x.index].shape)}" if isinstance(x, Operand) else repr(x)

    given = [*map(told, pytree.tree_leaves(call.args)), *(f"{k}={told(x)}" for k, x in call.kwargs.items())]
    log.warning(
        "op rule %s.%s failed for %s(%s): %s: %s. The operator is replicated: every rank computes all of it. Next step: mend "
        "the rule, or report this call", getattr(function, "__module__", "?"), getattr(function, "__qualname__", function),
        name_of(call.target), ", ".join(given), type(error).__name__, error)


def rule_of(node: Node) -> Rule | None:
    """Rule of a node, or None if its operator has none (it is then left whole)."""
    return rule_of_call(call_of(node))
