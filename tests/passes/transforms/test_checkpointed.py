"""A step whose forward lies in checkpointed regions -> rewritten, each call of forward is marked, and none of backward."""
from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from passes import compat
from passes.annotations import read
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.fx_nodes import is_collective
from passes.graph.planning_keys import OPERATIONS
from passes.graph.user_checkpointing import REGION, user_policy_of
from passes.transforms.shard.spmd_rewrite import shard
from tests.helpers.axes import axes_of
from tests.passes.traced import annotated_joint
from tests.passes.transforms.random_decisions import decide
from tests.passes.transforms.ranks import groups_of


class Layers(nn.Module):
    """All that forward does is in one region or the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = checkpoint(lambda t: nn.functional.dropout(self.first(t).tanh(), 0.5), x, use_reentrant=False)
        return checkpoint(lambda t: self.second(t).square().mean(), x, use_reentrant=False)


@functools.cache
def annotated() -> AnalyzedGraph:
    return annotated_joint(Layers(), torch.ones(4, 8))


def of_forward(gm: fx.GraphModule) -> list[fx.Node]:
    calls = gm.graph.find_nodes(op="output")[0].graph.nodes
    return [n for n in calls if n.op == "call_function" and n.meta.get("partitioner_tag") == "is_forward"]


def of_backward(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.meta.get("partitioner_tag") != "is_forward"]


def test_normalized_calls_are_marked_as_what_they_were():
    gm = annotated().gm
    assert {n.meta[REGION] for n in of_forward(gm)} == {n.meta[REGION] for n in gm.graph.nodes if REGION in n.meta}
    assert "aten.addmm.default" not in {str(n.target) for n in gm.graph.nodes}, "taken apart"
    assert not [n for n in of_backward(gm) if user_policy_of(n)]


@pytest.mark.parametrize("seed", range(8))
def test_calls_of_one_rank_are_marked_collectives_too(seed):
    gm = annotated().gm
    operations, axes = read(OPERATIONS, gm), axes_of(2, 2)
    decision = decide(operations.graph, axes, random.Random(seed))
    sharded = shard(gm, operations.graph, operations.rules, decision, groups_of((2, 2))[1], compat.fake_mode_of(gm))
    forward = of_forward(sharded)
    assert any(is_collective(n.target) for n in forward), "something is moved in forward"
    assert all(user_policy_of(n) for n in forward), [n.name for n in forward if not user_policy_of(n)]
    assert not [n.name for n in of_backward(sharded) if user_policy_of(n)]
