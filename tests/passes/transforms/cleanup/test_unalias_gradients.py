"""Gradients that share memory -> each with its own; others do not change."""
from __future__ import annotations

import torch
from torch import fx

from passes.transforms.cleanup.unalias_gradients import UnaliasGradients
from tests.passes.transforms.rank_graphs import RankGraph, aten


def changed(b: RankGraph, kept: tuple[int, ...], forward_outputs: int = 0) -> list[int]:
    """Places of the outputs that the pass made copies of."""
    gm = b.graph_module()
    before = list(gm.graph.output_node().args[0])
    assert isinstance(gm, fx.GraphModule)
    UnaliasGradients(kept, forward_outputs).run(gm)
    gm.graph.lint()
    gm.recompile()
    after = gm.graph.output_node().args[0]
    copied = [k for k, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new]
    assert all(after[k].target == aten.clone.default and after[k].args == (before[k],) for k in copied)
    assert all(after[k].meta["partitioner_tag"] == "is_backward" for k in copied)
    inputs = [torch.randn(shape) for shape in b.shapes]
    results = gm(*inputs)
    memory = [x.untyped_storage().data_ptr() for x in inputs]
    assert all(results[k].untyped_storage().data_ptr() not in memory for k in kept)
    return copied


def test_a_tangent_that_is_passed_through_is_copied_for_what_is_kept():
    b = RankGraph()
    tangent = b.operand(2, 3, name="tangents_1")
    b.outputs(tangent, tangent, b.call(aten.view.default, tangent, [6]))
    assert changed(b, kept=(0, 2)) == [0, 2]  # the other goes on to the graph before, as on one device


def test_of_two_gradients_in_one_memory_one_is_copied():
    b = RankGraph()
    computed = b.call(aten.neg.default, b.operand(2, 3))
    b.outputs(computed, b.call(aten.view.default, computed, [6]))
    assert changed(b, kept=(0, 1)) == [1]


def test_what_forward_returns_is_not_a_gradient_too():
    b = RankGraph()
    computed = b.call(aten.neg.default, b.operand(2, 3))
    b.outputs(computed, computed)
    assert changed(b, kept=(1,), forward_outputs=1) == [1]


def test_parts_of_a_bucket_stay():
    b = RankGraph()
    bucket = b.call(aten.neg.default, b.operand(8))
    b.outputs(*(b.call(aten.slice.Tensor, bucket, 0, start, start + 4) for start in (0, 4)),
              b.call(aten.slice.Tensor, bucket, 0, 2, 6))
    assert changed(b, kept=(0, 1, 2)) == [2]  # only this one overlaps


def test_a_part_of_what_nobody_needs_the_rest_of_is_copied_where_memory_counts():
    b = RankGraph()
    reduced, bucket = b.all_reduce(b.operand(8)), b.call(aten.neg.default, b.operand(8))
    b.outputs(b.call(aten.slice.Tensor, reduced, 0, 0, 4),
              *(b.call(aten.slice.Tensor, bucket, 0, start, start + 4) for start in (0, 4)))
    gm = b.graph_module()
    UnaliasGradients((0, 1, 2), 0, compact=True).run(gm)
    first, *others = gm.graph.output_node().args[0]
    assert first.target == aten.clone.default and first.prev is first.args[0], "copied at once, so that the rest can go"
    assert all(other.target == aten.slice.Tensor for other in others), "these two need all of theirs"


def test_none_and_gradients_with_memory_of_their_own_stay():
    b = RankGraph()
    x = b.operand(2, 3)
    b.graph.output([b.call(aten.neg.default, x), None, b.call(aten.mul.Tensor, x, 2.0)])
    assert changed(b, kept=(0, 2)) == []
