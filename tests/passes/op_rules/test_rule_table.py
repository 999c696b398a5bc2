"""The table as a whole: every operator in it has a sample, and others are replicated."""
from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from passes.json_records import FrozenMap
from passes.op_rules import rule_table
from passes.op_rules.base import Call, Operand, Rule, make_rule
from passes.op_rules.call_rules import apply_rule, rule_of, rule_of_call, spec_of
from passes.op_rules.rule_table import has_rule, is_pointwise, name_of, operator_of, rule, targets
from tests.passes.op_rules.families import (
    test_attention,
    test_convolutions,
    test_creation,
    test_grid_sampling,
    test_linalg,
    test_matmul,
    test_moe,
    test_pointwise_ops,
    test_quantized,
    test_reductions,
    test_slicing,
    test_special,
    test_table_lookups,
    test_view_ops,
)
from tests.passes.op_rules.families.harness import Run, f, overloads, sample

aten = torch.ops.aten
FAMILIES = (
    test_attention, test_convolutions, test_creation, test_table_lookups, test_linalg, test_matmul, test_pointwise_ops,
    test_quantized, test_reductions, test_moe, test_grid_sampling, test_special, test_view_ops, test_slicing,
)
FALLBACKS = {"pointwise", "random"}
"""Entries that stand for all operators with a tag."""
NEEDS_A_SEED = {"prims::inductor_seed", "prims::inductor_lookup_seed", "prims::inductor_randint"}
"""Drawn whole like `prims::inductor_random`, which is sampled."""
HIGHER_ORDER = {"flex_attention", "flex_attention_backward"}
"""They read graphs, which a sample has not: tests/hpml_compiler/compile/test_higher_order.py runs them split against whole."""


def samples() -> list:
    return [s for family in FAMILIES for name in ("SAMPLES", "RANDOM", "DROPOUT") for s in getattr(family, name, [])]


def call_of_sample(given) -> Call:
    operands = tuple(map(spec_of, given.args))
    return Call(given.target, tuple(map(Operand, range(len(operands)))), {}, operands, (spec_of(given.target(*given.args)),))


def test_every_operator_in_the_table_is_sampled():
    sampled = {name_of(s.target) for s in samples()}
    # Operators of other releases of torch.
    others = {name for name in targets() if ("lanczos" in name or name == "aten::cholesky")
              and not hasattr(aten, name.removeprefix("aten::"))}
    assert set(targets()) - FALLBACKS - NEEDS_A_SEED - HIGHER_ORDER - sampled - others == set()


def test_every_operator_has_a_sample_that_splits_or_is_whole_by_nature():
    whole = {name_of(s.target) for s in samples()} - {name_of(s.target) for s in samples() if not s.whole}
    random = {name_of(s.target) for s in test_creation.RANDOM}
    # A number has no dims; all bools, or the least, have no reduction over ranks; a product neither; the order of all
    # chosen elements counts.
    assert whole - random == {
        "aten::scalar_tensor", "aten::all", "aten::min", "aten::prod", "aten::mean", "aten::median", "aten::nanmedian",
        "aten::masked_scatter", "aten::masked_scatter_backward",
    }


def test_an_operator_without_a_rule_is_left_whole():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = f(4, 4)
    node = graph.call_function(aten._pdist_forward.default, (x,))
    node.meta["val"] = aten._pdist_forward.default(f(4, 4))
    assert not has_rule(aten._pdist_forward.default) and rule_of(node) is None
    assert not has_rule(operator.getitem)


def test_an_operator_may_stand_in_the_table_before_it_is_registered():
    assert has_rule(torch.ops.transformers.grouped_mm_fallback.default)
    assert operator_of(torch.ops.transformers.grouped_mm_fallback.default).heavy and not operator_of(aten.add.Tensor).heavy
    assert "aten::_grouped_mm" in targets()


def test_two_rules_for_one_operator_are_refused():
    with pytest.raises(ValueError, match="rule of aten::mm is registered twice"):
        rule(aten.mm.default)(lambda call: None)


@pytest.mark.parametrize("fails", [
    lambda call: 1 // 0,
    lambda call: make_rule(call, ["mk"], ["mn"]),
    lambda call: make_rule(call, [range(call.args[2])], [range(2)]),
    lambda call: Rule((), (), FrozenMap()),
    lambda call: "S(0)",
], ids=["raises", "too few operands", "takes an argument for granted", "does not fit", "is no rule"])
def test_a_rule_that_fails_leaves_its_operator_whole_and_says_so_once(fails, monkeypatch, caplog):
    monkeypatch.setitem(rule_table.OPERATORS, "aten::mv", rule_table.Operator(fails, "matmul"))
    call = call_of_sample(sample(aten.mv.default, f(8, 4), f(4)))
    assert rule_of_call(call) is None and rule_of_call(call) is None
    (record,) = caplog.records
    assert "failed for aten::mv(float64[8, 4], float64[4])" in record.message and "replicated" in record.message
    with pytest.raises(Exception):  # noqa: B017  # whatever the rule raised
        apply_rule(call)


def test_no_operator_is_both_pointwise_by_tag_and_drawn_at_random():
    assert [op for op in overloads("aten", "prims") if is_pointwise(op) and torch.Tag.nondeterministic_seeded in op.tags] == []


def test_samples_are_many():
    assert len(samples()) > 400 and len(targets()) > 200


def test_a_rule_that_does_not_fit_the_call_is_an_error():
    spec = sample(aten.mm.default, f(8, 4), f(4, 6))
    run = Run(spec)
    call: Call = run.call
    with pytest.raises(ValueError, match="names 1 tensors, the call has 2"):
        make_rule(call, ["mk"], ["mn"])
    with pytest.raises(ValueError, match="names 3 dims for shape"):
        make_rule(call, ["mkx", "kn"], ["mn"])
    with pytest.raises(ValueError, match="letters 'k' have the size 4 in a dim of 6"):
        make_rule(call, ["mk", "nk"], ["mn"])
    with pytest.raises(ValueError, match=r"letters \['a', 'b'\] have the size 6 in a dim of 8"):
        make_rule(call, [[["a", "b"], "k"], "kn"], [[["a", "b"], "n"]], sizes={"a": 2, "b": 3})
