"""Sharding rules for pointwise operators: all with torch's pointwise tag and some more, and which of them are linear.

Letters are the dims of the result, aligned from the right; dims along which an operand is broadcast have none.
"""
from __future__ import annotations

import torch

from passes.op_rules.base import Call, Operand, Rule, aligned, make_rule
from passes.op_rules.rule_table import name_of, rule

aten, prims = torch.ops.aten, torch.ops.prims

# Groups of arguments in which the operator is jointly linear, by position (an argument may be a number).
LINEAR_ARGUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten::neg": ((0,),),
    "aten::alias": ((0,),),
    "aten::detach": ((0,),),
    "aten::clone": ((0,),),
    "aten::lift_fresh_copy": ((0,),),
    "aten::add.Tensor": ((0, 1),),
    "aten::sub.Tensor": ((0, 1),),
    "aten::mul.Tensor": ((0,), (1,)),
    "aten::mul.Scalar": ((0,),),
    "aten::div.Tensor": ((0,),),
    "aten::div.Scalar": ((0,),),
    "aten::where.self": ((1, 2),),
    "aten::copy": ((1,), (0, 1)),
    "aten::_to_copy": ((0,),),
    "aten::_conj": ((0,),),
    "aten::complex": ((0, 1),),
    "aten::polar": ((0,),),
    "prims::convert_element_type": ((0,),),
    "prims::fma": ((0, 2), (1, 2)),
    "aten::addcmul": ((0, 1), (0, 2)),
    "aten::addcdiv": ((0, 1),),
    "aten::lerp.Scalar": ((0, 1),),
    "aten::lerp.Tensor": ((0, 1),),
}
# Linear if a number among the arguments is 0: (position of the number, position of the tensor).
LINEAR_BESIDE_ZERO = {"aten::masked_fill.Scalar": (2, 0)}
NOT_TAGGED = (
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.copy.default,
    aten._to_copy.default,
    aten._conj.default,
    aten.complex.default,
    aten.polar.default,
    aten.div.Tensor_mode,
    prims.convert_element_type.default,
)


def _linear(call: Call) -> list[list[int]]:
    name = name_of(call.target)
    groups = []
    for arguments in LINEAR_ARGUMENTS.get(name, ()):
        members = [call.args[i] for i in arguments if i < len(call.args)]
        # x + 3 is not linear in x: every member of the group must be a tensor.
        if len(members) == len(arguments) and all(isinstance(m, Operand) for m in members):
            groups.append([m.index for m in members])
    if name in LINEAR_BESIDE_ZERO:
        number, tensor = (call.args[i] for i in LINEAR_BESIDE_ZERO[name])
        if number == 0 and isinstance(tensor, Operand):
            groups.append([tensor.index])
    return groups


rule("pointwise", aten.clone.default, aten._to_copy.default, prims.convert_element_type.default, fusion="inlined")
rule("aten::exp", "aten::log", "aten::log10", "aten::log1p", "aten::log2", "aten::sigmoid", "aten::tanh", fusion="costly")
rule(aten.alias.default, aten.detach.default, view="part")


@rule("pointwise", *NOT_TAGGED)
def pointwise(call: Call) -> Rule:
    shape = call.results[0].shape if call.results else ()
    dims = range(len(shape))
    return make_rule(
        call, [aligned(dims, o.shape, shape) for o in call.operands], [dims for _ in call.results], linear=_linear(call)
    )


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Rule:
    """Elementwise in the elements; the test elements stay whole."""
    dims = range(len(call.results[0].shape))
    return make_rule(call, [dims, [None] * len(call.operands[1].shape)], [dims])
