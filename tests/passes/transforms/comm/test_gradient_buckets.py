"""Reductions one by one before, together and late after, with the same values."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.transforms.comm.gradient_buckets import BucketGradients
from tests.passes.transforms.rank_graphs import GROUP, RankGraph, names_after

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def after(build: RankGraph, **options: Any) -> list[str]:
    return names_after(build, BucketGradients(**options))


def reductions(calls: list[str]) -> list[str]:
    return [c for c in calls if c in ("all_reduce", "reduce_scatter_tensor")]


def test_gradients_are_reduced_together_and_waited_for_last():
    b = RankGraph()
    x, y = b.operand(4, 3), b.operand(5)
    first = b.all_reduce(x)
    heavy = b.call(aten.mm.default, x, b.operand(3, 2))
    second = b.all_reduce(y)
    calls = after(b.outputs(first, b.call(aten.mul.Tensor, second, 2.0), b.call(aten.relu.default, heavy)))
    assert reductions(calls) == ["all_reduce"] and calls.count("wait_tensor") == 1
    assert calls.index("wait_tensor") > calls.index("relu") and calls.index("mul") > calls.index("wait_tensor")


def test_where_bytes_count_a_bucket_is_waited_for_when_the_next_one_starts():
    b = RankGraph()
    x = b.operand(4, 4)
    outputs = []
    for _ in range(3):
        x = b.call(aten.mm.default, x, b.operand(4, 4))
        outputs.append(b.call(aten.slice.Tensor, b.all_reduce(x), 0, 0, 2))
    calls = after(b.outputs(*outputs), bucket_bytes=0, soon=True)
    some = [c for c in calls if c in ("mm", "all_reduce", "wait_tensor")]
    assert some == ["mm", "all_reduce", "mm", "wait_tensor", "all_reduce", "mm", "wait_tensor", "all_reduce", "wait_tensor"]
    assert calls.index("slice") < calls.index("wait_tensor") + 2, "and what follows goes with it"


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"soon": True}, 16), ({"soon": True, "by_block": True}, 1)])
def test_where_bytes_count_a_bucket_is_a_small_part_of_all_gradients(options, expected):
    b = RankGraph()
    reduced = [b.all_reduce(b.call(aten.mul.Tensor, b.operand(128, 128), 2.0)) for _ in range(32)]
    assert len(reductions(after(b.outputs(*reduced), **options))) == expected


@pytest.mark.parametrize(("by_block", "expected"), [(False, 1), (True, 2)])
def test_equal_layers_stay_equal_where_each_has_buckets_of_its_own(by_block, expected):
    b = RankGraph()
    x, outputs = b.operand(4), []
    for number, layer in enumerate((1, 1, 0, 0)):
        forward = b.call(aten.relu.default, x, tag="is_forward")
        forward.meta.update(seq_nr=number, nn_module_stack={"": (f"L['self'].layers[{layer}]", "script.Layer")})
        wait = b.all_reduce(b.call(aten.mul.Tensor, forward, 2.0))
        wait.args[0].meta["seq_nr"] = number
        outputs.append(wait)
    assert len(reductions(after(b.outputs(*outputs), by_block=by_block))) == expected


@pytest.mark.parametrize("nbytes", [0, 10_000])
def test_what_needs_two_reductions_comes_after_both(nbytes):
    b = RankGraph()
    x, y = b.operand(4), b.operand(4)
    first = b.all_reduce(x)
    heavy = b.call(aten.mul.Tensor, y, 3.0)
    second = b.all_reduce(heavy)
    alone = b.all_reduce(b.call(aten.mul.Tensor, heavy, 2.0))
    calls = after(b.outputs(b.call(aten.add.Tensor, first, second), alone), bucket_bytes=nbytes, soon=True)
    assert len(reductions(calls)) == (3 if not nbytes else 2)


def test_scatters_are_laid_side_by_side():
    b = RankGraph()
    calls = after(b.outputs(*(b.reduce_scatter(b.operand(*shape)) for shape in [(4, 3), (2,), (6, 2)])))
    assert reductions(calls) == ["reduce_scatter_tensor"]


def test_a_bucket_may_be_needed_by_one_that_was_made_before_it():
    """The maxima fill a bucket before the sums do that they are made of."""
    b = RankGraph()
    x = [b.operand(10) for _ in range(3)]

    def maximum(v):
        return b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, v, "max", GROUP))

    sums = [b.all_reduce(v) for v in x[:2]]
    maxima = [maximum(v) for v in (*sums, x[2])]
    products = [b.call(aten.mm.default, b.call(aten.view.default, v, [2, 5]), b.operand(5, 2)) for v in maxima]
    assert len(reductions(after(b.outputs(*products), bucket_bytes=80))) == 3


def test_a_bucket_is_closed_when_it_is_full():
    def build() -> RankGraph:
        b = RankGraph()
        return b.outputs(*(b.all_reduce(b.operand(10)) for _ in range(5)))

    assert len(reductions(after(build(), bucket_bytes=100))) == 3  # 40 bytes each
    assert len(reductions(after(build(), bucket_bytes=0))) == 5


def test_one_alone_is_waited_for_late():
    b = RankGraph()
    reduced = b.all_reduce(b.operand(4))
    calls = after(b.outputs(reduced, b.call(aten.relu.default, b.operand(3))))
    assert calls == ["all_reduce", "relu", "wait_tensor"]


def test_what_something_else_needs_is_not_delayed():
    b = RankGraph()
    x, y, weight = b.operand(4, 3), b.operand(4, 3), b.operand(3, 3)
    product = b.call(aten.mm.default, b.all_reduce(x), weight)
    other = b.call(aten.mm.default, b.all_reduce(y), weight)
    calls = after(b.outputs(product, other))
    assert calls == ["all_reduce", "wait_tensor", "mm"] * 2


def test_what_is_needed_after_the_last_operand_shares_a_bucket_of_its_own():
    b = RankGraph()
    x, y = b.all_reduce(b.operand(4, 3)), b.all_reduce(b.operand(3, 2))
    gradient = b.all_reduce(b.operand(7))
    product = b.call(aten.mm.default, x, y)
    calls = after(b.outputs(product, gradient))
    assert len(reductions(calls)) == 2
    assert calls.index("mm") < len(calls) - 1 - calls[::-1].index("wait_tensor")


@pytest.mark.parametrize("change", ["kind", "operation", "dtype"])
def test_only_like_reductions_go_together(change):
    b = RankGraph()
    x, y = b.operand(4), b.operand(4)
    y = b.call(aten.relu.default, y)
    if change == "dtype":
        y = b.call(torch.ops.prims.convert_element_type.default, y, torch.float64)
    second = b.call(c10d.all_reduce.default, y, "max" if change == "operation" else "sum", GROUP)
    nodes = b.all_reduce(x), b.call(c10d.wait_tensor.default, second)
    if change == "kind":
        nodes = nodes[0], b.reduce_scatter(y)
    assert len(reductions(after(b.outputs(*nodes)))) == 2


def test_forward_is_left_alone():
    b = RankGraph()
    x, y = b.all_reduce(b.operand(4), tag="is_forward"), b.all_reduce(b.operand(4), tag="is_forward")
    gm = b.outputs(x, y).graph_module()
    before = str(gm.graph)
    assert not BucketGradients().run(gm) and str(gm.graph) == before
