"""A forward value moved in forward, for backward alone to read -> it stays in the layer that made it."""
from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import nn

from passes import compat
from passes.annotations import read
from passes.graph.decision import Decision, Route
from passes.graph.fx_nodes import is_collective
from passes.graph.module_blocks import block_of, runs_in_backward
from passes.graph.placement_graph import PlacementGraph
from passes.graph.planning_keys import OPERATIONS
from passes.graph.step_phase import FORWARD
from passes.json_records import FrozenMap
from passes.transforms.shard.spmd_rewrite import shard
from tests.helpers.axes import axes_of
from tests.passes.traced import annotated_joint
from tests.passes.transforms.random_decisions import decide
from tests.passes.transforms.ranks import groups_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner(x).pow(2).mean(-1, keepdim=True).exp()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_it_is_in_the_layer_that_made_it():
    annotated, found = annotated_joint(Layers(), torch.ones(4, 8)), list[tuple[str, str]]()
    operations = read(OPERATIONS, annotated.gm)
    for seed in range(4):
        decision = _moved_in_forward(decide(operations.graph, axes_of(2, 2), random.Random(seed)), operations.graph)
        gm = shard(annotated.gm, operations.graph, operations.rules, decision, groups_of((2, 2))[1],
                   compat.fake_mode_of(annotated.gm))
        for node in gm.graph.find_nodes(op="output")[0].graph.nodes:
            moved = is_collective(node.target) or node.target == torch.ops.aten.slice.Tensor
            if moved and not runs_in_backward(node) and node.users and all(map(runs_in_backward, node.users)):
                found.append((block_of(node), block_of(node.all_input_nodes[0])))
    assert len(found) > 4 and all(own == of_operand for own, of_operand in found)


def _moved_in_forward(decision: Decision, graph: PlacementGraph) -> Decision:
    """With all that forward makes moved there."""
    def in_forward(route: Route) -> Route:
        producer = graph.values[route.value].producer
        if producer is None or graph.operations[producer].phase != FORWARD:
            return route
        return replace(route, hops=tuple(replace(hop, phase=FORWARD) for hop in route.hops))

    return replace(decision, routes=FrozenMap(
        {key: in_forward(route) for key, route in decision.routes.items()}))
