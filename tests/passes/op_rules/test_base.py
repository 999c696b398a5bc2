"""From letters to strategies, by hand-written rules."""
from __future__ import annotations

import pytest

from passes.json_records import FrozenMap
from passes.op_rules.base import Rule, aligned, format_placement, parse_placement, strategies
from passes.op_rules.sum_dtypes import keeps_sums
from tests.passes.op_rules.families.harness import describe


def found(rule: Rule | None, operands, results) -> set[str]:
    return {describe(s) for s in strategies(rule, operands, results)}


def one_dim(letters, size: int, **fields) -> Rule:
    return Rule(inputs=((letters,),), outputs=((letters,),), sizes=FrozenMap({x: size for x in letters}), **fields)


def test_without_a_rule_everything_is_whole():
    assert found(None, [((8,),), ((4,),)], [((8,),)]) == {"R R -> R"}


def test_every_factor_of_a_letter_splits():
    assert found(one_dim("a", 12), [((3, 4),)], [((3, 4),)]) == {"R -> R", "S(0) -> S(0)", "S(0.1) -> S(0.1)"}


def test_places_that_disagree_on_factors_share_only_the_outermost():
    assert found(one_dim("a", 12), [((3, 4),)], [((12,),)]) == {"R -> R", "S(0) -> S(0)"}


def test_a_letter_without_factors_in_one_place_does_not_split():
    rule = Rule((((("a", "b")),),), ((("a",), ("b",)),), FrozenMap({"a": 4, "b": 6}))
    # The dim of 24 is known as 3 * 8: neither 4 nor 6 begins or ends there, and 3 does not divide 4.
    assert found(rule, [((3, 8),)], [((4,), (6,))]) == {"R -> R"}
    # 2 divides 4: half of the dim is half of a.
    assert found(rule, [((2, 12),)], [((4,), (6,))]) == {"R -> R", "S(0) -> S(0)"}
    assert found(rule, [((4, 6),)], [((4,), (6,))]) == {"R -> R", "S(0) -> S(0)", "S(0.1) -> S(1)"}


def test_a_letter_that_a_result_lacks_splits_only_if_it_is_reduced_or_of_no_concern_there():
    rule = Rule((((("a",)),),), ((), ()), FrozenMap({"a": 4}))
    wholes = [(), ()]
    assert found(rule, [((4,),)], wholes) == {"R -> R R"}
    for field, expected in (
        ({"summed": frozenset("a")}, "S(0) -> P P"),
        ({"maxed": frozenset("a")}, "S(0) -> M M"),
        ({"summed": frozenset("a"), "aside": frozenset({1})}, "S(0) -> P R"),
        ({"summed": frozenset("a"), "repeated": FrozenMap({"a": frozenset({0})})}, "S(0) -> R P"),
        ({"repeated": FrozenMap({"a": frozenset({0, 1})})}, "S(0) -> R R"),
    ):
        assert expected in found(Rule(rule.inputs, rule.outputs, rule.sizes, **field), [((4,),)], wholes)


def test_blocked_letters_and_letters_on_a_diagonal_stay_whole():
    assert found(one_dim("a", 4, blocked=frozenset("a")), [((4,),)], [((4,),)]) == {"R -> R"}
    diagonal = Rule(((("a",), ("a",)),), ((("a",),),), FrozenMap({"a": 4}))
    assert found(diagonal, [((4,), (4,))], [((4,),)]) == {"R -> R"}


def test_where_a_position_counts_only_the_outermost_factor_splits():
    assert found(one_dim("a", 8, ordered=frozenset("a")), [((2, 4),)], [((2, 4),)]) == {"R -> R", "S(0) -> S(0)"}
    assert found(one_dim("a", 8, indexed={"a": 0}), [((2, 4),)], [((2, 4),)]) == {"R -> R", "S(0) -> S(0)"}


def test_what_is_added_once_comes_partial_where_a_sum_is_split():
    rule = Rule(((), (("k",),)), ((),), FrozenMap({"k": 4}), summed=frozenset("k"), addends=frozenset({0}))
    assert "P S(0) -> P" in found(rule, [(), ((4,),)], [()])


def test_linear_groups_take_partial_sums():
    rule = Rule(((), (), ()), ((),), FrozenMap(), linear=(frozenset({0, 2}), frozenset()))
    assert found(rule, [(), (), ()], [()]) == {"R R R -> R", "P R P -> P", "R R R -> P"}


def test_operands_line_up_at_the_right():
    assert aligned("abc", (4, 1), (2, 4, 6)) == ["b", None]
    assert aligned("abc", (), (2, 4, 6)) == []


@pytest.mark.parametrize(("source", "target", "keeps"), [
    ("float32", "bfloat16", True), ("int64", "int64", True), ("int64", "int32", True), ("uint8", "int8", True),
    ("bool", "bool", True), ("float32", "complex64", True), ("complex64", "float32", True), ("int32", "int64", False),
    ("int64", "float32", False), ("int8", "bfloat16", False), ("uint8", "float64", False), ("float32", "int64", False),
    ("bool", "int64", False), ("bool", "float32", False), ("float32", "bool", False), ("bfloat16", "uint8", False),
    ("uint8", "bool", False), ("float32", "float8_e4m3fn", False), ("float8_e5m2", "bfloat16", False),
])
def test_which_conversions_commute_with_a_sum(source, target, keeps):
    assert keeps_sums(source, target) is keeps


@pytest.mark.parametrize("placement", ["R", "P", "M", (0, 0), (2, 1)])
def test_a_placement_reads_back(placement):
    assert parse_placement(format_placement(placement)) == placement


def test_a_text_that_is_no_placement_is_refused():
    with pytest.raises(ValueError, match=r"not a placement: 'X'; one of R, P, M"):
        parse_placement("X")
