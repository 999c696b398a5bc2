"""Whole training steps under random decisions: each strategy of each operator, on one axis and on two, with whatever
collectives that takes, gives the outputs and gradients of one device."""
from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from passes import compat
from passes.analyses.placement_graph_builder import build_placement_graph
from passes.graph.fx_nodes import BY_COORDINATE, constants_of
from passes.graph.placement_graph import PlacementGraph
from passes.op_rules.base import Rule
from passes.transforms.cleanup.normalization import normalize
from passes.transforms.comm.gradient_buckets import BucketGradients
from passes.transforms.shard.spmd_rewrite import shard
from tests.helpers.axes import axes_of
from tests.passes.op_rules.families.steps import traced
from tests.passes.op_rules.families.zoo import MODELS
from tests.passes.transforms.random_decisions import decide
from tests.passes.transforms.ranks import cut, groups_of, run

aten = torch.ops.aten


@dataclass(frozen=True)
class Prepared:
    """A normalized graph, values of its inputs, the planner's view of it, its rules, and what one device returns."""

    gm: fx.GraphModule
    values: list[Any]
    graph: PlacementGraph
    rules: Sequence[Rule | None]
    results: list[torch.Tensor]


@functools.cache
def prepared(name: str, number: int) -> Prepared:
    step = traced(name)[number]
    gm, fake_mode = step.gm, compat.fake_mode_of(step.gm)
    normalize(gm, fake_mode)
    (output,) = gm.graph.find_nodes(op="output")
    returned = [n for n in compat.pytree.tree_leaves(output.args, is_leaf=lambda x: isinstance(x, fx.Node))
                if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)]
    kinds = {n.name: "batch" for n in gm.graph.find_nodes(op="placeholder")}
    graph, rules = build_placement_graph(gm, kinds, [(n.name, None) for n in returned], lambda node: 0.0)
    torch.manual_seed(1)
    return Prepared(gm, step.values, graph, rules, _tensors(fx.Interpreter(gm).run(*step.values)))


def _tensors(results: Any) -> list[torch.Tensor]:
    return [x for x in compat.pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


def _calls(gm: fx.GraphModule) -> list[tuple[Any, str]]:
    """With their constants; but parts of what the graph is given are slices, which may be taken before it runs."""
    def is_part(node: fx.Node) -> bool:
        return BY_COORDINATE in node.meta and node.target in (aten.slice.Tensor, aten.select.int) and _given(node.args[0])

    return [(node.target, "" if is_part(node) else constants_of(node)) for node in gm.graph.nodes]


def _given(x: Any) -> bool:
    return x.op == "placeholder" or x.target is aten.reshape.default and x.args[0].op == "placeholder"


def check(prepared: Prepared, sizes: tuple[int, ...], seed: int, asks: bool) -> tuple[int, int]:
    """Decide, rewrite, run and compare; returns how many operations were split, of how many. asks: with graphs that ask
    where their rank is; those of all ranks are equal then."""
    gm, graph = prepared.gm, prepared.graph
    decision = decide(graph, axes_of(*sizes), random.Random(seed))
    groups = groups_of(sizes)
    by_name = {v.name: v for v in graph.values if v.producer is None}
    placeholders = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    graphs, inputs = [], []
    for place in groups:
        graphs.append(shard(gm, graph, prepared.rules, decision, place, compat.fake_mode_of(gm), asks))
        BucketGradients(bucket_bytes=2**14).run(graphs[-1])
        inputs.append([
            cut(x, by_name[n], decision.inputs[by_name[n].index], place) if n in by_name else x
            for n, x in zip(placeholders, prepared.values, strict=True)
        ])
    if asks:
        assert all(_calls(gm) == _calls(graphs[0]) for gm in graphs)
    torch.manual_seed(1)
    results = [_tensors(out) for out in run(graphs, groups, inputs)]
    for k, whole in enumerate(prepared.results):
        value, layout = graph.values[graph.outputs[k][0]], decision.outputs[k].target
        for rank, place in enumerate(groups):
            torch.testing.assert_close(
                results[rank][k], cut(whole, value, layout, place), rtol=1e-4, atol=1e-6, equal_nan=True,
                check_stride=False, msg=lambda m, k=k, rank=rank: f"{sizes} seed {seed}, output {k}, rank {rank}: {m}",
            )
    split = sum(any(isinstance(p, tuple) for lay in (*o.inputs, *o.made) for p in lay) for o in decision.operations.values())
    return split, len(decision.operations)


ALIKE = ("gpt2", "vit", "whisper", "convnet")
"""Models of operators that llama and bert, swin, t5 and speech, efficientnet and unet have, too."""


def cases() -> list[tuple[str, tuple[int, ...]]]:
    """Each model on one mesh, the two in turn, without ALIKE; HPML_TEST_EVERYTHING=1 takes all of them on both."""
    both = [(4,), (2, 2)]
    if os.environ.get("HPML_TEST_EVERYTHING") == "1":
        return [(name, sizes) for name in MODELS for sizes in both]
    return [(name, both[k % 2]) for k, name in enumerate(name for name in MODELS if name not in ALIKE)]


@pytest.mark.parametrize(("name", "sizes"), cases(), ids=str)
def test_a_training_step_gives_what_one_device_gives(name, sizes):
    for number in range(len(traced(name))):
        split, operations = check(prepared(name, number), sizes, seed=len(name), asks=sizes == (2, 2))
        assert split > operations / 4 or operations < 20
