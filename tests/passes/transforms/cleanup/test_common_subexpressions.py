"""Equal calls become one, but calls deferred to backward stay there."""
from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from passes import compat
from passes.graph.graph_copy import copy_graph
from passes.presets import annotate
from passes.sharding.search.placement_passes import AdoptPlacements
from passes.transforms.cleanup.common_subexpressions import Deduplicate
from passes.transforms.shard.spmd_rewrite import BACKWARD_ON_PURPOSE, Shard
from tests.helpers.axes import axes_of
from tests.passes.op_rules.families.steps import traced
from tests.passes.transforms.random_decisions import decide
from tests.passes.transforms.rank_graphs import RankGraph, aten
from tests.passes.transforms.ranks import groups_of, run

HELD_BACK = {"tag": BACKWARD_ON_PURPOSE}


def calls(gm: fx.GraphModule) -> list[str]:
    return [n.target.__name__.split(".")[0] for n in gm.graph.nodes if n.op == "call_function"]


def deduplicated(build: RankGraph) -> fx.GraphModule:
    gm = build.graph_module()
    Deduplicate().run(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def test_equal_calls_of_equal_calls_become_one():
    b = RankGraph()
    x = b.operand(2, 3)
    sides = [b.call(aten.neg.default, b.call(aten.mul.Tensor, b.all_reduce(x), 2.0)) for _ in range(2)]
    b.outputs(b.call(aten.add.Tensor, *sides))
    groups, inputs = groups_of((2,)), [[torch.randn(2, 3)] for _ in range(2)]
    expected = run([b.graph_module()] * 2, groups, inputs)
    gm = deduplicated(b)
    assert calls(gm) == ["all_reduce", "wait_tensor", "mul", "neg", "add"]
    torch.testing.assert_close(run([gm] * 2, groups, inputs), expected)


@pytest.mark.parametrize("arguments", [(1, 1.0), (1, True), (0.5, 0.25), (0.0, -0.0)])
def test_arguments_of_other_types_or_values_stay_apart(arguments):
    b = RankGraph()
    x = b.operand(3)
    parts = [b.call(aten.add.Tensor, x, a) for a in arguments]
    b.outputs(b.call(aten.mul.Tensor, *parts))
    assert calls(deduplicated(b)) == ["add", "add", "mul"]


def test_random_numbers_are_drawn_as_often_as_before():
    b = RankGraph()
    x = b.operand(3)
    b.outputs(b.call(aten.add.Tensor, *(b.call(aten.rand_like.default, x) for _ in range(2))))
    assert calls(deduplicated(b)) == ["rand_like", "rand_like", "add"]


def test_two_results_of_a_collective_do_not_share_memory():
    """The gradients of two biases that are added to the same."""
    b = RankGraph()
    x = b.operand(3, 2)
    b.outputs(*(b.all_reduce(b.call(aten.sum.dim_IntList, x, [0])) for _ in range(2)))
    gm = deduplicated(b)
    assert calls(gm) == ["sum", "all_reduce", "wait_tensor", "all_reduce", "wait_tensor"]
    (first, second), _ = run([gm] * 2, groups_of((2,)), [[torch.ones(3, 2)] for _ in range(2)])
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, second)


def test_two_results_do_not_share_memory():
    b = RankGraph()
    x = b.operand(3)
    b.outputs(b.call(aten.neg.default, x), b.call(aten.neg.default, x))
    first, second = deduplicated(b)(torch.ones(3))
    assert first.data_ptr() != second.data_ptr()


def gathered_twice() -> RankGraph:
    """y = x · w and the gradient of x, with half of w on each rank."""
    b = RankGraph()
    w, x, t = b.operand(32, 8), b.operand(4, 64), b.operand(4, 8, name="tangents_1")
    y = b.call(aten.mm.default, x, b.all_gather(w, tag="is_forward"), tag="is_forward")
    again = b.call(aten.t.default, b.all_gather(w, **HELD_BACK), **HELD_BACK)
    return b.outputs(y, b.call(aten.mm.default, t, again))


def test_what_is_held_back_for_backward_is_not_forwards():
    gm = deduplicated(gathered_twice())
    assert calls(gm).count("all_gather_into_tensor") == 2


def test_what_forward_gathered_is_not_saved():
    gm = deduplicated(gathered_twice())
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    forward, backward = compat.min_cut_partition(gm, (inputs[:2], inputs[2:]), 1, ())
    saved = [n.meta["val"].shape for n in forward.graph.output_node().args[0][1:]]
    assert saved == [torch.Size([32, 8])]
    assert calls(forward).count("all_gather_into_tensor") == calls(backward).count("all_gather_into_tensor") == 1


def test_all_ranks_have_the_same_calls_afterwards():
    """Positions that begin at 0 are on the first rank what whole positions are."""
    step = traced("llama")[0]
    gm = copy_graph(step.gm)
    graph = annotate(gm, step.inputs, step.forward_outputs).graph
    decision, told = decide(graph, axes_of(2, 2), random.Random(0)), []
    for place in groups_of((2, 2))[:2]:
        own = copy_graph(gm)
        annotate(own, step.inputs, step.forward_outputs)
        for transform in (AdoptPlacements(decision), Shard(place), Deduplicate()):
            transform(own)
        told.append([(n.target, [x.name for x in n.all_input_nodes]) for n in own.graph.nodes if n.op == "call_function"])
    assert told[0] == told[1]
