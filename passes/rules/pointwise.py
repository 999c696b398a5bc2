"""Pointwise operators: all that torch tags so, and which of them are linear.

Letters are the dims of the result, aligned from the right; an operand that is broadcast along a dim has none there.
"""
from __future__ import annotations

import torch

from passes.rules.base import Call, Operand, Rule, make_rule
from passes.rules.table import rule

aten, prims = torch.ops.aten, torch.ops.prims

# Operands in which the operator is jointly linear, by position among *arguments* (an argument may be a number).
LINEAR_ARGUMENTS: dict[object, tuple[tuple[int, ...], ...]] = {
    aten.neg.default: ((0,),),
    aten.alias.default: ((0,),),
    aten.detach.default: ((0,),),
    aten.clone.default: ((0,),),
    aten.lift_fresh_copy.default: ((0,),),
    aten.add.Tensor: ((0, 1),),
    aten.sub.Tensor: ((0, 1),),
    aten.mul.Tensor: ((0,), (1,)),
    aten.mul.Scalar: ((0,),),
    aten.div.Tensor: ((0,),),
    aten.div.Scalar: ((0,),),
    aten.where.self: ((1, 2),),
    aten.copy.default: ((1,),),
    aten._to_copy.default: ((0,),),
    prims.convert_element_type.default: ((0,),),
    prims.fma.default: ((0, 2), (1, 2)),
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.lerp.Scalar: ((0, 1),),
    aten.masked_fill.Scalar: (),
}
NOT_TAGGED = (
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.copy.default,
    aten._to_copy.default,
    aten.div.Tensor_mode,
    prims.convert_element_type.default,
    prims.fma.default,
)


def _linear(call: Call) -> list[list[int]]:
    if call.target in (prims.convert_element_type.default, aten._to_copy.default):
        source, target = call.operands[0].dtype, call.results[0].dtype
        # Rounding commutes with a sum to rounding; truncation to integers and bools does not.
        if "bool" in (source, target) or ("float" in source and "float" not in target):
            return []
    groups = []
    for arguments in LINEAR_ARGUMENTS.get(call.target, ()):
        members = [call.args[i] for i in arguments if i < len(call.args)]
        # x + 3 is not linear in x: every member of the group has to be a tensor.
        if len(members) == len(arguments) and all(isinstance(m, Operand) for m in members):
            groups.append([m.index for m in members])
    return groups


def pointwise(call: Call) -> Rule:
    shape = call.results[0].shape if call.results else ()

    def letters(own: tuple[int, ...]) -> list[int | None]:
        shift = len(shape) - len(own)
        return [i + shift if own[i] == shape[i + shift] else None for i in range(len(own))]

    return make_rule(
        call,
        [letters(o.shape) for o in call.operands],
        [list(range(len(shape))) for _ in call.results],
        linear=_linear(call),
    )


rule(*[t for t in NOT_TAGGED])(pointwise)
