"""Strategies of single operations -> strategies of a group on one axis."""
from __future__ import annotations

import random

import pytest

from passes.graph.step_phase import FORWARD
from passes.sharding.grouping.op_groups import OpGroup, groups_of
from passes.sharding.strategies.group_strategies import (
    MAX_STATES,
    GroupStrategy,
    GroupStrategyCache,
    strategies_on_axis,
    undominated_ends,
)
from passes.solver.work_limit import WorkLimit
from tests.passes.graphs import Builder, V, aten


def joints(builder: Builder, outputs, size=2, reduce_us=lambda b: 1.0, allowed=None) -> list[GroupStrategy]:
    graph = builder.finish(outputs)
    groups = groups_of(graph)
    (c,) = groups if len(groups) == 1 else [whole(graph, groups)]
    more = {} if allowed is None else {"allowed": allowed}
    return strategies_on_axis(c, graph, size, reduce_us, 1e-3, 1e-6, **more)


def whole(graph, groups) -> OpGroup:
    """All operations in one group, whatever grouping thinks."""
    made = {v for op in graph.operations for v in op.outputs}
    inputs = tuple(dict.fromkeys(v for op in graph.operations for v in op.inputs if v not in made))
    return OpGroup(0, tuple(range(len(graph.operations))), inputs, tuple(v for v, _ in graph.outputs), FORWARD, "")


def ports(found: list[GroupStrategy]) -> set[tuple]:
    return {(j.inputs, j.outputs) for j in found}


def test_a_chain_passes_one_split_from_end_to_end():
    b = Builder()
    x = b.input((8, 4))
    y = b.call(aten.exp.default, V(x))
    y = b.call(aten.permute.default, V(y), [1, 0])
    y = b.call(aten.tanh.default, V(y))
    found = joints(b, [y])
    assert ports(found) >= {(((0, 0),), ((1, 0),)), (((1, 0),), ((0, 0),)), (("R",), ("R",))}
    for j in found:
        placed = [p for step in j.operations for p in (*step.strategy.inputs, *step.strategy.outputs)]
        assert len({isinstance(p, tuple) for p in placed}) == 1


def test_sizes_that_do_not_divide_are_left_out():
    b = Builder()
    y = b.call(aten.exp.default, V(b.input((6, 4))))
    assert (((0, 0),), ((0, 0),)) not in ports(joints(b, [y], size=4))
    assert (((1, 0),), ((1, 0),)) in ports(joints(b, [y], size=4))


def softmax_by_hand(rows: int, columns: int) -> tuple[Builder, int]:
    b = Builder()
    x = b.input((rows, columns))
    e = b.call(aten.exp.default, V(x))
    total = b.call(aten.sum.dim_IntList, V(e), [1], True)
    return b, b.call(aten.div.Tensor, V(e), V(total))


def test_a_small_partial_sum_may_be_reduced_inside():
    b, y = softmax_by_hand(4, 64)
    split = [j for j in joints(b, [y]) if j.inputs == ((1, 0),)]
    assert [j.outputs for j in split] == [((1, 0),)]
    assert [s.reduced for s in split[0].operations] == [(False,), (True,), (False,)]
    assert split[0].operations[1].strategy.outputs == ("P",) and split[0].operations[1].placed() == ("R",)


def test_a_large_partial_sum_is_not_reduced_inside():
    b, y = softmax_by_hand(64, 4)
    assert not any(j.inputs == ((1, 0),) for j in joints(b, [y]))
    assert any(j.inputs == ((0, 0),) for j in joints(b, [y]))


def test_of_two_places_to_reduce_the_cheaper_one_is_taken():
    b = Builder()
    total = b.call(aten.sum.dim_IntList, V(b.input((64, 2))), [0], True)  # 8 bytes
    wide = b.call(aten.expand.default, V(total), [4, 2])  # 32 bytes
    y = b.call(aten.exp.default, V(wide))
    for reduce_us, flags in ((float, [True, False]), (lambda nbytes: 100.0 - nbytes, [False, True])):
        (found,) = [j for j in joints(b, [y], reduce_us=reduce_us) if (j.inputs, j.outputs) == (((0, 0),), ("R",))]
        assert [s.reduced[0] for s in found.operations[:2]] == flags


def test_what_cannot_be_split_where_it_is_made_may_be_read_in_parts():
    b = Builder()
    x = b.input((8, 4))
    mask = b.call(aten.tanh.default, V(b.input((8, 4), "constant")), ruled=False)
    y = b.call(aten.mul.Tensor, V(x), V(mask))
    found = [j for j in joints(b, [y]) if j.outputs == ((0, 0),)]
    assert [j.inputs for j in found] == [("R", (0, 0))]  # the mask's operand first: it is read first
    assert found[0].operations[0].strategy.outputs == ("R",) and found[0].operations[1].strategy.inputs == ((0, 0), (0, 0))


def test_a_value_has_one_placement_for_all_readers_inside():
    b = Builder()
    x = b.input((4, 4))
    e = b.call(aten.exp.default, V(x))
    t = b.call(aten.permute.default, V(e), [1, 0])
    y = b.call(aten.mul.Tensor, V(e), V(t))
    found = joints(b, [y])
    assert ports(found) == {(("R",), ("R",))}  # rows of e would have to meet columns of it


def test_restrictions_are_obeyed():
    b = Builder()
    y = b.call(aten.exp.default, V(b.input((8, 4))))
    only = joints(b, [y], allowed=lambda op, s: s.inputs == ((1, 0),))
    assert ports(only) == {(((1, 0),), ((1, 0),))}
    assert joints(b, [y], allowed=lambda op, s: False) == []


def test_the_number_of_states_is_bounded():
    b = Builder()
    y = None
    for _ in range(7):  # a product of states: seven separate strands, all returned
        strand = b.call(aten.exp.default, V(b.input((8, 4, 4))))
        y = strand if y is None else y
    graph = b.finish([op.outputs[0] for op in b.operations])
    found = strategies_on_axis(whole(graph, []), graph, 2, lambda nbytes: 1.0, 1e-3, 1e-6)
    assert 1 < len(found) <= MAX_STATES + 1  # and the whole one


def test_what_was_found_once_is_found_again_only_where_reductions_cost_something_else():
    searches, known = [], GroupStrategyCache()

    def found(us: float, priced: bool) -> list[GroupStrategy]:
        def search(reduce_cost) -> list[GroupStrategy]:
            searches.append(us)
            return [GroupStrategy(("R",), (str(reduce_cost(8)),), ())] if priced else []

        return known.find(priced, lambda nbytes: us * nbytes, search, WorkLimit(1.0))

    assert found(1.0, True) == found(1.0, True) != found(2.0, True) == found(2.0, True)
    assert found(1.0, False) == found(2.0, False)
    assert searches == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("reads, makes", [(0, 1), (1, 0), (1, 2), (3, 2)])
def test_undominated_ends_are_those_of_pairwise_comparison(reads, makes):
    """Strategy by strategy: the whole value may be sliced for a reader of a shard, and a whole result for its readers."""
    draw = random.Random(reads + 10 * makes)

    def replaces(a, b) -> bool:
        return all(p == q or (isinstance(p, tuple) and q == "R") for p, q in zip(a[0], b[0])) and all(
            p == q or (p == "R" and isinstance(q, tuple)) for p, q in zip(a[1], b[1]))

    for count in (0, 1, 2, 40):
        found = [tuple(tuple(draw.choice(["R", "P", "M", (0, 0), (1, 0)]) for _ in range(n)) for n in (reads, makes))
                 for _ in range(count)]
        kept: list[int] = []
        for k, ends in enumerate(found):
            if not any(replaces(found[old], ends) for old in kept):
                kept.append(k)
        assert undominated_ends([inputs for inputs, _ in found], [outputs for _, outputs in found]) == kept
