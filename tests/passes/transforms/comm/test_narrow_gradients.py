"""Marked reductions before, exchanges of 16-bit numbers after, with the sum of rounded addends."""
from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.graph.fx_nodes import COMPRESSION
from passes.transforms.comm.gradient_buckets import BucketGradients
from passes.transforms.comm.narrow_gradients import NarrowGradients
from tests.passes.transforms.rank_graphs import RankGraph
from tests.passes.transforms.ranks import groups_of, run

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def rewritten(b: RankGraph, *marked: fx.Node) -> tuple[list[str], list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Names of the calls after both passes, inputs and results by rank."""
    for wait in marked:
        (start,) = wait.all_input_nodes
        start.meta[COMPRESSION] = "bf16", 2
    gm = b.graph_module()
    BucketGradients().run(gm)
    NarrowGradients().run(gm)
    gm.graph.lint()
    groups = groups_of((2,))
    inputs = [[torch.randn(shape) for shape in b.shapes] for _ in groups]
    return names_of(gm), inputs, run([gm] * 2, groups, inputs)


def names_of(gm: fx.GraphModule) -> list[str]:
    return [n.target.__name__.split(".")[0] for n in gm.graph.nodes if callable(n.target)]


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize("shapes", [[(4, 3)], [(3, 3), (5,)], [(1,)]])
def test_a_sum_has_rounded_addends_and_is_rounded(shapes):
    b = RankGraph()
    reduced = [b.all_reduce(b.operand(*shape)) for shape in shapes]
    calls, inputs, results = rewritten(b.outputs(*reduced), *reduced)
    assert [c for c in calls if c.startswith("all_")] == ["all_to_all_single", "all_gather_into_tensor"]
    for one, two, *sums in zip(*inputs, *results, strict=True):
        for each in sums:
            torch.testing.assert_close(each, bf16(bf16(one) + bf16(two)), rtol=0, atol=0)


def test_shards_of_a_sum_are_not_rounded():
    b = RankGraph()
    reduced = b.reduce_scatter(b.operand(4, 3))
    calls, ((one,), (two,)), results = rewritten(b.outputs(reduced), reduced)
    assert "reduce_scatter_tensor" not in calls and "all_gather_into_tensor" not in calls
    torch.testing.assert_close(torch.cat([x for (x,) in results]), bf16(one) + bf16(two), rtol=0, atol=0)


def test_unmarked_reductions_stay_and_the_sum_is_made_when_the_next_one_starts():
    b = RankGraph()
    x = b.operand(4)
    first, plain = b.all_reduce(x), b.all_reduce(b.operand(4))
    heavy = b.call(aten.mm.default, b.operand(4, 4), b.operand(4, 4))
    second = b.all_reduce(heavy)
    for node in (first, second):
        node.args[0].meta[COMPRESSION] = "bf16", 2
    gm = b.outputs(first, plain, second).graph_module()
    BucketGradients(bucket_bytes=0).run(gm)
    NarrowGradients().run(gm)
    started = [c for c in names_of(gm) if c in ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "mm", "sum")]
    assert started == ["all_to_all_single", "all_reduce", "mm", "sum", "all_gather_into_tensor", "all_to_all_single", "sum",
                       "all_gather_into_tensor"]
