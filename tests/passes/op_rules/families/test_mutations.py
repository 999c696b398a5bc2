"""The harness itself: a rule, or a rewrite, that is wrong in one place does not pass."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from passes.json_records import FrozenMap
from passes.op_rules import rule_table, shifted_indices
from passes.op_rules.base import Rule
from tests.passes.op_rules.families.harness import Sample, check, f, i, sample

aten = torch.ops.aten


def without(**fields: object) -> Callable[[Rule], Rule]:
    return lambda rule: replace(rule, **fields)


MUTATIONS = [
    # a reduced dim that may be split although the operator needs all of it
    (sample(aten._softmax.default, f(8, 4), 1, False), without(
        inputs=(((0,), (1,)),), outputs=(((0,), (1,)),), sizes={0: 8, 1: 4})),
    (sample(aten.amin.default, f(8, 4), [0]), without(blocked=frozenset(), maxed=frozenset({0}))),
    # a sum that nobody adds up, or that is added up although it is the maximum
    (sample(aten.mm.default, f(4, 8), f(8, 4)), without(summed=frozenset(), maxed=frozenset("k"))),
    (sample(aten.amax.default, f(8, 4), [0]), without(maxed=frozenset(), summed=frozenset({0}))),
    # linear where it is not
    (sample(aten.mul.Tensor, f(8, 4), f(8, 4)), without(linear=(frozenset({0, 1}),))),
    (sample(aten.exp.default, f(8, 4)), without(linear=(frozenset({0}),))),
    (sample(aten.add.Tensor, f(8, 4), f(8, 4)), without(linear=(frozenset({0}),))),
    # a bias that every rank adds
    (sample(aten.addmm.default, f(4), f(4, 8), f(8, 4)), without(addends=frozenset())),
    # two letters for each other
    (sample(aten.transpose.int, f(4, 4, 2), 0, 1), lambda rule: replace(rule, outputs=rule.inputs)),
    (sample(aten.view.default, f(4, 4), [16]), lambda rule: replace(rule, outputs=((rule.outputs[0][0][::-1],),))),
    (sample(aten.bmm.default, f(4, 4, 4), f(4, 4, 4)),
     lambda rule: replace(rule, inputs=(rule.inputs[0], (("b",), ("n",), ("k",))))),
    # an index that is not shifted, an iota that starts at 0 everywhere
    (sample(aten.embedding.default, f(8, 4), i(8, 6)), without(indexed={})),
    (sample(torch.ops.prims.iota.default, 8, start=0, step=1, dtype=torch.int64, device=torch.device("cpu"),
            requires_grad=False), without(ordered=frozenset())),
    # a gradient of a bias that is summed over ranks that all have it
    (sample(aten.convolution_backward.default, f(4, 8, 3), f(4, 6, 5), f(8, 6, 3), [8], [1], [0], [1], False, [0], 1,
            [True, True, True]), lambda rule: replace(rule, repeated=FrozenMap(), summed=rule.summed | {"i"})),
    # queries of causal attention
    (sample(aten._scaled_dot_product_flash_attention_for_cpu.default, f(2, 2, 8, 4), f(2, 2, 8, 4), f(2, 2, 8, 4), 0.0, True),
     without(blocked=frozenset())),
]


@pytest.mark.parametrize(("case", "mutate"), MUTATIONS, ids=[str(case) for case, _ in MUTATIONS])
def test_a_wrong_rule_fails(case: Sample, mutate, monkeypatch):
    check(case)
    name = rule_table.name_of(case.target)
    known = rule_table.operator_of(case.target)
    monkeypatch.setitem(rule_table.OPERATORS, name, replace(known, rule=lambda call: mutate(known.rule(call))))
    with pytest.raises(AssertionError):
        check(case)


def test_a_wrong_rewrite_fails(monkeypatch):
    case = sample(aten.slice.Tensor, f(12, 4), 0, 4, 8)
    check(case)
    known = rule_table.operator_of(aten.slice.Tensor)
    monkeypatch.setitem(rule_table.OPERATORS, "aten::slice.Tensor", replace(known, local=None))
    with pytest.raises(AssertionError):
        check(case)


def test_an_index_that_wraps_in_the_part_instead_of_the_whole_fails(monkeypatch):
    case = sample(aten.index.Tensor, f(12, 4), [i(12, 64, low=-12)])
    check(case)
    monkeypatch.setattr(shifted_indices, "whole_size", lambda call: 0)
    with pytest.raises(AssertionError):
        check(case)
