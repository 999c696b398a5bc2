"""The table of op rules: which function gives the rule of an operator.

A family (a file beside this one) registers its functions with `@rule(op, ...)`; operators that torch tags pointwise
need no entry, and those that it tags as drawing random numbers are left whole. `rule_of(node)` reads the call off an FX
node and asks the table.
"""
from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from passes.compat import OpOverload, depends_on_data, pytree, size_hint, static_int
from passes.op_rules.base import Call, Operand, Rule, RuleFunction, Spec
from passes.op_rules.opaque_calls import leaves_of
from passes.registrations import Registrations
from passes.session_state import state_of

FAMILIES = (
    "attention", "convolutions", "creation", "table_lookups", "flex_kernels", "linalg", "matmul", "pointwise_ops", "pooling",
    "quantized", "reductions", "moe", "grid_sampling", "scatter", "special", "view_ops", "slicing",
)
UNBACKED_SIZE = 8192
log = logging.getLogger("hpml")


class RegisteredRule(NamedTuple):
    """heavy: see `rule`."""

    function: RuleFunction
    heavy: bool


RULES: Registrations[RegisteredRule] = Registrations()
"""By name of the operator (`name_of`)."""


class _FailedRules(set[tuple[Any, Any]]):
    """Operators and rules already reported as incompatible by a warning."""


def name_of(target: Any) -> str:
    """`aten::add.Tensor`, `aten::neg`: operators stand in the table by name, so that one which is registered later, or
    only in some releases, can have a rule too."""
    return target.name() if isinstance(target, OpOverload) else str(target)


def rule(*targets: Any, heavy: bool = False) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for operators, given themselves or by name.

    `heavy` marks those whose work is worth a decision of its own (matrix products, attention, table look-ups): others
    are clustered with their neighbors.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for name in map(name_of, targets):
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = RegisteredRule(function, heavy)
        return function

    return register


@cache
def load() -> None:
    for family in FAMILIES:
        importlib.import_module(f"passes.op_rules.families.{family}")


def targets() -> tuple[str, ...]:
    """Names of all operators with an entry, in no particular order."""
    load()
    return tuple(RULES)


def external_rules() -> dict[str, RuleFunction]:
    """By operator, the rules that are not of this package."""
    load()
    return {name: function for name, (function, _) in RULES.items()
            if not function.__module__.startswith("passes.op_rules.families.")}


def is_random(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not is_random(target)


def _lookup(target: Any) -> RuleFunction | None:
    load()
    name = "pointwise" if is_pointwise(target) else "random" if is_random(target) else ""
    found = RULES.get(name_of(target)) or RULES.get(name)
    return None if found is None else found.function


def is_heavy(target: Any) -> bool:
    load()
    found = RULES.get(name_of(target))
    return found is not None and found.heavy


def has_rule(target: Any) -> bool:
    return _lookup(target) is not None


def spec_of(value: Any) -> Spec:
    """Spec of a tensor (fake ones too); sizes must be numbers. One that depends on data counts as inductor counts it."""
    shape = tuple(size_hint(s, UNBACKED_SIZE) if depends_on_data(s) else int(s) for s in value.shape)
    return Spec(shape, str(value.dtype).removeprefix("torch."), value.dtype.itemsize)


def results_of(node: Node) -> list[Any]:
    """Tensors that a node returns; None entries of a tuple are dropped."""
    return [v for _, v in leaves_of(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def operand_nodes(node: Node) -> list[Node]:
    """Nodes among the arguments that stand for tensors, in the order of tree_leaves; a node may occur twice."""
    leaves = pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
    return [x for x in leaves if isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor)]


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
    function = _lookup(call.target)
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
    function = _lookup(call.target)
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
