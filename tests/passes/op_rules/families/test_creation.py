"""Tensors made from numbers: split constants, positions with offsets, random numbers drawn at positions, or whole."""
from __future__ import annotations

import pytest
import torch

from passes.compat import POSITIONS, RANDOM_AT
from passes.op_rules.base import strategies
from passes.op_rules.rule_table import has_rule, is_pointwise
from tests.passes.op_rules.families.harness import Run, check, f, i, overloads, sample

aten, prims = torch.ops.aten, torch.ops.prims
CPU = torch.device("cpu")


def iota(length: int, start: int = 0, step: int = 1, dtype: torch.dtype = torch.int64):
    return sample(prims.iota.default, length, start=start, step=step, dtype=dtype, device=CPU, requires_grad=False,
                  expect="-> S(0)")


SAMPLES = [
    sample(aten.full.default, [8, 4], 0, expect="-> S(0); -> S(1); -> P"),
    sample(aten.full.default, [8, 4], 3.5, dtype=torch.float64, expect="-> S(0)"),
    sample(aten.full.default, [8], False, expect="-> P"),
    sample(aten.full_like.default, f(8, 4), 0, expect="S(0) -> S(0); P -> P; R -> P"),
    sample(aten.full_like.default, f(8, 4), float("-inf"), expect="S(1) -> S(1)"),
    sample(aten.full_like.default, f(8, 4), 2, dtype=torch.int64),
    sample(aten.new_full.default, f(3), [8, 4], 0, expect="R -> S(0); R -> P"),
    sample(aten.new_zeros.default, f(3), [8, 4], expect="R -> S(0); R -> P"),
    sample(aten.new_ones.default, f(3), [8, 4], expect="R -> S(0)"),
    sample(aten.new_empty.default, f(3), [8, 4], values=False, expect="R -> S(0)"),
    sample(aten.zeros_like.default, f(8, 4), expect="S(0) -> S(0); P -> P; R -> P"),
    sample(aten.ones_like.default, f(8, 4), expect="S(0) -> S(0)"),
    sample(aten.empty_like.default, f(8, 4), values=False, expect="S(0) -> S(0)"),
    sample(aten.scalar_tensor.default, 0.0, dtype=torch.float64, whole=True, expect="-> P"),
    sample(aten.scalar_tensor.default, 2.0, whole=True),
    sample(aten.zeros.default, [8, 4], expect="-> S(0); -> P"),
    sample(aten.ones.default, [8, 4], expect="-> S(1)"),
    sample(aten.empty.memory_format, [8, 4], values=False, expect="-> S(0)"),
    sample(aten.empty_strided.default, [8, 4], [1, 8], values=False, expect="-> S(0)"),
    sample(aten.new_empty_strided.default, f(3), [8, 4, 2], [8, 1, 4], values=False, expect="R -> S(0); R -> S(1)"),
    iota(8), iota(12, start=3), iota(8, start=10, step=-2), iota(8, start=1, step=3, dtype=torch.int32),
    sample(aten.arange.start_step, 0, 8, expect="-> S(0)"),
    sample(aten.arange.start_step, 2, 16, 3, expect="-> S(0)"),
    sample(aten.arange.start_step, 9, -3, -1, dtype=torch.int32),
    sample(aten.arange.start_step, 0.5, 4.5, 0.5, dtype=torch.float64, expect="-> S(0)"),
    sample(aten.arange.default, 8, expect="-> S(0)"),
    sample(aten.arange.start, 3, 11, dtype=torch.float64, expect="-> S(0)"),
    sample(RANDOM_AT, torch.tensor(3), "rand", [i(99, 8), i(99, 12)],
           expect="R S(0) R -> S(0); R R S(0) -> S(1); R R S(0.1) -> S(1.1)"),
    sample(RANDOM_AT, torch.tensor(3), "randn", [i(99, 8, dtype=torch.int32)], expect="R S(0) -> S(0)"),
]
RANDOM = [
    sample(aten.rand.default, [8, 4], whole=True, values=False),
    sample(aten.randn.default, [8, 4], whole=True, values=False),
    sample(aten.randint.low, 0, 4, [8, 4], whole=True, values=False),
    sample(aten.randperm.default, 8, whole=True, values=False),
    sample(aten.rand_like.default, f(8, 4), whole=True, values=False),
    sample(aten.randn_like.default, f(8, 4), whole=True, values=False),
    sample(aten.randint_like.default, i(4, 8), 4, whole=True, values=False),
    sample(aten.bernoulli.p, f(8, 4), 0.5, whole=True, values=False),
    sample(aten.bernoulli.default, f(8, 4).abs().clamp(max=1), whole=True, values=False),
    sample(aten.native_dropout.default, f(8, 4), 0.5, True, whole=True, values=False),
    sample(aten.normal_functional.default, f(8, 4), whole=True, values=False),
    sample(aten.normal.Tensor_float, f(8, 4), 1.0, whole=True, values=False),
    sample(aten.uniform.default, f(8, 4), whole=True, values=False),
    sample(aten.exponential.default, f(8, 4), whole=True, values=False),
    sample(aten.multinomial.default, f(8, 4).abs(), 2, whole=True, values=False),
    sample(aten.rrelu_with_noise_functional.default, f(8, 4), f(8, 4), 0.1, 0.3, True, whole=True, values=False),
    sample(prims.inductor_random.default, [8, 4], torch.tensor(3), "rand", whole=True, values=False),
    sample(POSITIONS, 8, 4, dtype=torch.int32, device=CPU, whole=True),
    sample(prims.inductor_seeds.default, 4, CPU, whole=True, values=False),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_sharded_equals_whole(case):
    assert check(case) > 0


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_random_numbers_are_drawn_whole_on_every_rank(case):
    """Parts drawn by each rank would not be the parts of what one device draws: only the whole is the same everywhere."""
    run = Run(case)
    assert has_rule(case.target) and run.rule is not None
    factors = run.factors(finer=True)
    (only,) = strategies(run.rule, factors[: len(run.call.operands)], factors[len(run.call.operands) :])
    assert set(only.inputs + only.outputs) == {"R"}


def test_every_operator_that_draws_random_numbers_is_left_whole():
    """All that torch tags as seeded, also those of releases to come."""
    seeded = [op for op in overloads("aten", "prims") if torch.Tag.nondeterministic_seeded in op.tags]
    assert len(seeded) > 40
    assert [op for op in seeded if is_pointwise(op)] == []
