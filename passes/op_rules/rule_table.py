"""The table of operators: what is known about each, and the one function that registers it, `rule`.

A family (a file in `passes.op_rules.families`) says everything about its operators; users say it about theirs in the same way.
Operators that torch tags as pointwise, random or reductions need no entry: the entries "pointwise", "random" and "reduction"
hold for them, except for what is said about them by name.
"""
from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import torch
from torch.fx import Node

from passes.compat import OpOverload
from passes.op_rules.base import RuleFunction
from passes.op_rules.local_call import Insert, LocalCall
from passes.registrations import Registrations

FAMILIES = (
    "attention", "convolutions", "creation", "table_lookups", "flex_kernels", "linalg", "matmul", "pointwise_ops", "pooling",
    "quantized", "reductions", "moe", "grid_sampling", "scatter", "special", "view_ops", "slicing",
)
Heavy = Literal["matmul", "attention", "convolution", "embedding"]
View = Literal["part", "whole"]
Fusion = Literal["none", "fuses", "scatters", "inlined", "costly"]


@dataclass(frozen=True)
class Operator:
    """Properties of an operator; the fields are explained at `rule`. None: nothing is registered. external: something
    was registered by other code than this package's."""

    rule: RuleFunction | None = None
    heavy: Heavy | None = None
    flops: Callable[..., float] | float | None = None
    view: View | None = None
    recomputable: bool | None = None
    fusion: Fusion | None = None
    sizes: int | None = None
    local: Callable[[LocalCall, Insert], Node] | None = None
    layout: Callable[[torch.Tensor], bool] | None = None
    external: bool = False

    @property
    def kind(self) -> str:
        """One of `passes.cost_model.base.COMPUTE_KINDS`."""
        return self.heavy or ("view" if self.view else "pointwise")


UNKNOWN = Operator()
OPERATORS: Registrations[Operator] = Registrations()
"""By name of the operator (`name_of`), so that one which is registered later, or only in some releases, can stand here too."""


def name_of(target: Any) -> str:
    """`aten::add.Tensor`, `aten::neg`, also of an operator's text in a graph or plan, `aten.neg.default`."""
    if isinstance(target, OpOverload):
        return target.name()
    parts = str(target).split(".")
    return f"{parts[0]}::{parts[1]}.{parts[2]}".removesuffix(".default") if len(parts) == 3 else str(target)


def packet_name(target: Any) -> str:
    """`add` of any overload of add, in any namespace; `getitem` of Python's own function."""
    parts = str(target).split(".")
    return parts[1] if len(parts) > 1 else "getitem" if "getitem" in parts[0] else ""


def rule(*targets: Any, heavy: Heavy | bool | None = None, flops: Callable[..., float] | float | None = None,
         view: View | None = None, recomputable: bool | None = None, fusion: Fusion | None = None,
         sizes: int | None = None, local: Callable[[LocalCall, Insert], Node] | None = None,
         layout: Callable[[torch.Tensor], bool] | None = None) -> Callable[[RuleFunction], RuleFunction]:
    """Register what is known about operators, given themselves or by name (`"my_ops::rotate"`).

    Used as a decorator, it also registers the function that gives their sharding rule; a call alone registers the rest, for
    operators without a rule of their own.

    - heavy: the work is worth a placement of its own, and costs what kernels of this kind cost: "matmul", "attention",
      "convolution" or "embedding" (bound by memory), which is what True means. Others are grouped with their neighbors.
    - flops: number of floating point operations, as a function of the call's arguments as meta tensors and `out_val=`, its
      result (the convention of `torch.utils.flop_counter.register_flop_formula`), or a number for each element of the
      result. Default: torch's formula, else 1 for each element.
    - view: the result is the memory of the first operand, "whole" or in "part". Default: it has memory of its own.
    - recomputable: False: a second call may return something else, or has other effects than the first. Default: True, but
      for operators that draw random numbers or change their arguments.
    - fusion: what the compiler makes of a call: "none", a kernel of its own; "fuses", a kernel that also computes what it
      reads; "scatters", the same unless it needs atomic additions that the device lacks; "inlined", a part of the kernels that
      read the result; "costly", the same, but on CPUs not computed twice. Default: "inlined" for pointwise ones by torch's
      tag, else "none".
    - sizes: position of the argument that is the shape of the first result; a rank gives its local shape.
    - local: makes the call on a rank's operands, for operators with other arguments that depend on sizes, or with indices or
      positions in a split dim. Default: the same call on local operands.
    - layout: whether the kernel takes an operand with these strides; others are copied to contiguous memory. Default: any.

    Raises ValueError if the same is registered twice.
    """
    module = sys._getframe(1).f_globals.get("__name__", "")
    given = {"heavy": "embedding" if heavy is True else heavy or None, "flops": flops, "view": view,
             "recomputable": recomputable, "fusion": fusion, "sizes": sizes, "local": local, "layout": layout}
    names = [*map(name_of, targets)]

    def add(found: dict[str, Any], by: str) -> None:
        found = {key: value for key, value in found.items() if value is not None}
        if not found:
            return
        for name in names:
            before = OPERATORS.get(name, UNKNOWN)
            twice = [key for key in found if getattr(before, key) is not None]
            if twice:
                raise ValueError(f"{twice[0]} of {name} is registered twice")
        for name in names:
            before = OPERATORS.get(name, UNKNOWN)
            external = before.external or not by.startswith("passes.op_rules.families.")
            OPERATORS[name] = replace(before, **found, external=external)

    def register(function: RuleFunction) -> RuleFunction:
        add({"rule": function}, function.__module__)
        return function

    add(given, module)
    return register


@cache
def load() -> None:
    for family in FAMILIES:
        importlib.import_module(f"passes.op_rules.families.{family}")


def targets() -> tuple[str, ...]:
    """Names of all operators with a rule, in no particular order."""
    load()
    return tuple(name for name, operator in OPERATORS.items() if operator.rule is not None)


def external_operators() -> dict[str, Operator]:
    """By name, the operators about which other code than this package's has registered something."""
    load()
    return {name: operator for name, operator in OPERATORS.items() if operator.external}


def is_random(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not is_random(target)


def operator_of(target: Any) -> Operator:
    """The properties of an operator, given itself or by its text in a graph or plan, `aten.mm.default`."""
    known = OPERATORS.derived.get(target)
    if known is None:
        load()  # registers, which empties the cache
        known = OPERATORS.derived[target] = _properties(_target_of(target) if isinstance(target, str) else target)
    return known


def _properties(target: Any) -> Operator:
    found, tagged = OPERATORS.get(name_of(target), UNKNOWN), OPERATORS.get(_tag_of(target), UNKNOWN)
    if found is UNKNOWN or tagged is UNKNOWN:
        return tagged if found is UNKNOWN else found
    return replace(tagged, **{each.name: value for each in fields(found) if (value := getattr(found, each.name)) is not None})


def _tag_of(target: Any) -> str:
    if is_random(target):
        return "random"
    if is_pointwise(target):
        return "pointwise"
    return "reduction" if getattr(torch.Tag, "reduction", None) in getattr(target, "tags", ()) else ""


def _target_of(text: str) -> Any:
    """The operator of a text such as `aten.mm.default`; the text itself where there is none."""
    found = re.fullmatch(r"(\w+)\.(\w+)\.(\w+)", text)
    return getattr(getattr(getattr(torch.ops, found[1]), found[2], None), found[3], text) if found else text


def has_rule(target: Any) -> bool:
    return operator_of(target).rule is not None
