"""Pointwise operators: every one that torch tags, and which of them pass partial sums on."""
from __future__ import annotations

import itertools

import pytest
import torch

from passes.op_rules.rule_table import has_rule, is_pointwise
from tests.passes.op_rules.families.harness import Sample, b, check, f, i, overloads, sample

aten, prims = torch.ops.aten, torch.ops.prims

SAMPLES = [
    sample(aten.add.Tensor, f(8, 4), f(8, 4), expect="S(0) S(0) -> S(0); S(1) S(1) -> S(1); P P -> P"),
    sample(aten.add.Tensor, f(8, 4), f(4), alpha=3, expect="S(0) R -> S(0); S(1) S(0) -> S(1); P P -> P"),
    sample(aten.add.Tensor, f(8, 1, 4), f(6, 1), expect="S(0) R -> S(0); R S(0) -> S(1); S(2) R -> S(2)"),
    sample(aten.add.Tensor, f(8, 4), 1.0, expect="S(0) -> S(0)"),
    sample(aten.add.Tensor, f(8, 4), f(), expect="S(0) R -> S(0); P P -> P"),
    sample(aten.sub.Tensor, f(8, 4), f(8, 1), expect="S(1) R -> S(1); P P -> P"),
    sample(aten.sub.Tensor, 1.0, f(8, 4), expect="S(0) -> S(0)"),
    sample(aten.mul.Tensor, f(8, 4), f(8, 1), expect="P R -> P; R P -> P; S(1) R -> S(1)"),
    sample(aten.mul.Tensor, f(8, 4), 2.0, expect="P -> P"),
    sample(aten.mul.Tensor, 2.0, f(8, 4), expect="P -> P"),
    sample(aten.div.Tensor, f(8, 4), f(8, 4), expect="P R -> P"),
    sample(aten.div.Tensor, 2.0, f(8, 4), expect="S(0) -> S(0)"),
    sample(aten.div.Tensor, i(9, 8, 4), 2, expect="S(0) -> S(0)"),
    sample(aten.div.Tensor_mode, f(8, 4), 2.0, rounding_mode="floor", expect="S(0) -> S(0)"),
    sample(aten.neg.default, f(8, 4), expect="P -> P"),
    sample(aten.where.self, b(8, 4), f(8, 4), f(8, 4), expect="R P P -> P; S(0) S(0) S(0) -> S(0)"),
    sample(aten.where.self, b(8, 1), f(4), f(), expect="S(0) R R -> S(0); R S(0) R -> S(1); R P P -> P"),
    sample(prims.fma.default, f(8, 4), f(8, 4), f(8, 4), expect="P R P -> P; R P P -> P"),
    sample(aten.addcmul.default, f(8, 4), f(8, 4), f(4), value=2, expect="P P R -> P; P R P -> P"),
    sample(aten.addcdiv.default, f(8, 4), f(8, 4), f(8, 4).abs() + 1, expect="P P R -> P"),
    sample(aten.lerp.Scalar, f(8, 4), f(8, 4), 0.3, expect="P P -> P"),
    sample(aten.lerp.Tensor, f(8, 4), f(8, 4), f(8, 4), expect="P P R -> P"),
    sample(aten.copy.default, f(8, 4), f(4), expect="R P -> P; S(0) R -> S(0)"),
    sample(prims.convert_element_type.default, f(8, 4), torch.float32, expect="P -> P"),
    sample(prims.convert_element_type.default, i(9, 8, 4, dtype=torch.int32), torch.int64),
    sample(prims.convert_element_type.default, i(9, 8, 4), torch.int8, expect="P -> P"),
    sample(prims.convert_element_type.default, i(9, 8, 4), torch.float64),
    sample(prims.convert_element_type.default, f(8, 4), torch.int64),
    sample(prims.convert_element_type.default, b(8, 4), torch.int64),
    sample(prims.convert_element_type.default, f(8, 4), torch.bool),
    sample(aten._to_copy.default, f(8, 4), dtype=torch.float32, expect="P -> P"),
    sample(aten.clone.default, f(8, 4), memory_format=torch.contiguous_format, expect="P -> P"),
    sample(aten.clone.default, b(8, 4), expect="P -> P"),
    sample(aten.detach.default, f(8, 4), expect="P -> P"),
    sample(aten.lift_fresh_copy.default, f(8, 4), expect="P -> P"),
    sample(aten.polar.default, f(8, 4), f(8, 4), expect="S(0) S(0) -> S(0); P R -> P"),
    sample(aten.complex.default, f(8, 4), f(8, 4), expect="S(0) S(0) -> S(0); P P -> P"),
    sample(aten._conj.default, torch.complex(f(8, 4), f(8, 4)), expect="S(0) -> S(0); P -> P"),
    sample(aten.isin.Tensor_Tensor, i(9, 8, 4), i(9, 5), expect="S(0) R -> S(0)"),
    sample(prims.fma.default, f(8, 1), f(4), f(8, 4)),
    sample(aten.clamp.default, f(8, 4), -0.5, 0.5, expect="S(0) -> S(0)"),
    sample(aten.clamp.Tensor, f(8, 4), f(4), None, expect="S(0) R -> S(0); S(1) S(0) -> S(1)"),
    sample(aten.round.decimals, f(8, 4), decimals=2),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0


TAGGED = [op for op in overloads("aten", "prims") if is_pointwise(op)]


def arguments(op) -> list | None:
    """Positional arguments with which an operator runs: operands of one kind, that broadcast if they may."""
    kinds = (lambda *s: f(*s).abs() + 0.1, lambda *s: f(*s).clamp(-0.9, 0.9), lambda *s: i(5, *s, low=1), b,
             lambda *s: torch.complex(f(*s), f(*s)))
    for kind, second in itertools.product(kinds, [(4,), (8, 4)]):
        args: list = []
        shapes = iter([(8, 4), second, (8, second[-1]), (8, 4), (8, 4)])
        for argument in op._schema.arguments:
            if argument.kwarg_only or argument.has_default_value():
                continue
            text = str(argument.type)
            plain = {"int": 2, "float": 0.5, "bool": True, "number": 2, "str": "none"}
            args.append(kind(*next(shapes)) if text == "Tensor" else plain.get(text))
        try:
            result = op(*args)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError):
            continue
        return args if isinstance(result, torch.Tensor) else None
    return None


@pytest.mark.parametrize("op", TAGGED, ids=str)
def test_what_torch_tags_pointwise_is(op):
    assert has_rule(op)
    args = arguments(op)
    if args is None:
        pytest.skip("returns no tensor, or has no CPU kernel for the operands tried")
    check(Sample(op, tuple(args)))


def test_most_tagged_operators_run_here():
    assert sum(arguments(op) is not None for op in TAGGED) > 0.9 * len(TAGGED)
