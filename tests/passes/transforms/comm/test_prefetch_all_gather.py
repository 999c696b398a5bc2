"""Gathers that are each waited for at once before -> together, and a block before they are read after, with the same values."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE
from passes.transforms.comm.prefetch_all_gather import PrefetchAllGather, starts_ahead
from tests.passes.transforms.rank_graphs import RankGraph, names_after

aten = torch.ops.aten
SHORT = {"all_gather_into_tensor": "start", "all_gather_into_tensor_coalesced": "start together", "wait_tensor": "wait"}


def in_block(node: fx.Node, block: str) -> fx.Node:
    node.meta["nn_module_stack"] = {"self": (block, "toy.Layer")}
    return node


def layers(count: int) -> RankGraph:
    """Two products in each, of weights that are gathered just before."""
    b = RankGraph()
    x = b.operand(4, 4, name="x")
    weights = [[b.operand(2, 4, name=f"w{k}{j}") for j in range(2)] for k in range(count)]
    for k in range(count):
        for weight in weights[k]:
            whole = in_block(b.all_gather(weight, tag="is_forward"), f"layers.{k}")
            transposed = in_block(b.call(aten.t.default, whole, tag="is_forward"), f"layers.{k}")
            x = in_block(b.call(aten.mm.default, x, transposed, tag="is_forward"), f"layers.{k}")
    return b.outputs(x)


def after(build: RankGraph, **options: Any) -> list[str]:
    names = names_after(build, PrefetchAllGather(**options))
    return [SHORT.get(name, name) for name in names if name not in ("t", "getitem")]


def test_the_next_block_is_gathered_while_one_computes():
    assert after(layers(3)) == [
        "start together", "wait", "wait", "start together", "mm", "mm", "wait", "wait", "start together", "mm", "mm",
        "wait", "wait", "mm", "mm"]


def test_by_themselves_no_more_than_a_block_is_under_way():
    assert after(layers(3), bucket_bytes=0) == [
        "start", "start", "wait", "start", "mm", "wait", "start", "mm", "wait", "start", "mm", "wait", "start", "mm",
        "wait", "mm", "wait", "mm"]


def test_where_bytes_are_scarce_each_is_gathered_where_it_is_read():
    assert after(layers(2), ahead=False) == ["start", "wait", "mm"] * 4


def backward() -> RankGraph:
    """What is gathered for backward stands at its beginning, as autograd's views of weights do."""
    b = RankGraph()
    x, tangent = b.operand(4, 4, name="x"), b.operand(4, 4, name="tangents_1")
    weights = [b.operand(2, 4, name=f"w{k}") for k in range(3)]
    views = []
    for k, weight in enumerate(weights):
        whole = b.all_gather(weight, tag=BACKWARD_ON_PURPOSE)
        views.append(b.call(aten.t.default, whole, tag=BACKWARD_ON_PURPOSE))
        x = in_block(b.call(aten.relu.default, x, tag="is_forward"), f"layers.{k}")
        x.meta["seq_nr"] = k
    gradient = b.call(aten.neg.default, tangent)
    for k, view in reversed(list(enumerate(views))):
        gradient = b.call(aten.mm.default, gradient, view)
        gradient.meta["seq_nr"] = k
    return b.outputs(x, gradient)


def test_backward_gathers_when_it_has_begun_and_a_block_before_it_reads():
    relus = ["relu"] * 3
    assert after(backward()) == [
        *relus, "neg", "start", "wait", "start", "mm", "wait", "start", "mm", "wait", "mm"]
    assert after(backward(), ahead=False) == [*relus, "neg", *["start", "wait", "mm"] * 3]


def test_only_what_is_alike_goes_together_and_no_more_than_a_bucket_holds():
    def calls(**options: Any) -> list[str]:
        b = RankGraph()
        x = b.operand(2, 2, name="x")
        weights = [b.operand(1, 2, name=f"w{k}") for k in range(4)]
        for k, weight in enumerate(weights):
            part = b.call(aten._to_copy.default, weight, tag="is_forward") if k < 3 else weight
            if k == 1:
                part.kwargs = {"dtype": torch.float64}
                with b.fake_mode:
                    part.meta["val"] = torch.empty(1, 2, dtype=torch.float64)
            whole = in_block(b.all_gather(part, tag="is_forward"), "layers.0")
            x = in_block(b.call(aten.add.Tensor, x, whole, tag="is_forward"), "layers.0")
        return [call for call in after(b.outputs(x), **options) if call.startswith("start")]

    assert calls() == ["start together", "start"]
    assert calls(bucket_bytes=32) == ["start together", "start", "start"]


def test_what_is_little_goes_with_the_block_that_follows():
    b = RankGraph()
    x = b.operand(16, 16, name="x")
    weights = [b.operand(8, 16, name="large"), b.operand(8, name="little"), b.operand(8, 16, name="last")]
    for weight, module in zip(weights, ("layers.0", "norm", "head"), strict=True):
        whole = in_block(b.all_gather(weight, tag="is_forward"), module)
        x = in_block(b.call(aten.add.Tensor, x, whole, tag="is_forward"), module)
    assert after(b.outputs(x)) == ["start", "wait", "start together", "add", "wait", "wait", "add", "add"]


def test_a_layer_that_gathers_little_is_a_block_all_the_same():
    """So that the last one, before a large head, is as those before it."""
    b = RankGraph()
    x = b.operand(16, 16, name="x")
    weights = [b.operand(8, name="first"), b.operand(8, name="second"), b.operand(8, 16, name="head")]
    for weight, module in zip(weights, ("layers.0", "layers.1", "head"), strict=True):
        whole = in_block(b.all_gather(weight, tag="is_forward"), module)
        x = in_block(b.call(aten.add.Tensor, x, whole, tag="is_forward"), module)
    assert after(b.outputs(x)) == ["start", "wait", "start", "add", "wait", "start", "add", "wait", "add"]


def test_activations_are_gathered_where_they_were():
    b = RankGraph()
    x = b.call(aten.mm.default, b.operand(2, 4), b.operand(4, 4), tag="is_forward")
    gm = b.outputs(b.call(aten.relu.default, b.all_gather(x, tag="is_forward"), tag="is_forward")).graph_module()
    assert not PrefetchAllGather().run(gm) and not starts_ahead(gm.graph)
