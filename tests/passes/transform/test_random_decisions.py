"""Whole training steps under random decisions: each strategy of each operator, on one axis and on two, with whatever
collectives that takes, gives the outputs and gradients of one device."""
from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx

from passes import compat
from passes.analysis.operations import build_placement_graph
from passes.placement_graph import PlacementGraph
from passes.rules.base import Rule
from passes.transform.normalize import normalize
from passes.transform.shard import shard
from tests.passes.rules.harness import join
from tests.passes.rules.zoo import MODELS
from tests.passes.transform.lockstep import mesh_groups, run
from tests.passes.transform.random_decisions import decide


def traced(name: str) -> tuple[fx.GraphModule, list[Any]]:
    """A model's joint graph in double precision, and values for its inputs: the model's own, and random tangents."""
    joints: list[fx.GraphModule] = []
    values: list[Any] = []

    def partition(joint, inputs, *, num_fwd_outputs, **kwargs):
        joints.append(joint)
        return compat.default_partition(joint, inputs, num_fwd_outputs, None)

    def forward(gm, _):
        def record(*args):
            values.extend(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
            return gm(*args)

        return make_boxed_func(record)

    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.double()
    batch = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    backend = compat.aot_autograd(
        fw_compiler=forward, bw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition,
        decompositions=compat.inductor_decompositions(),
    )
    torch.compiler.reset()
    try:
        torch.compile(model, backend=backend)(**batch)
    finally:
        torch.compiler.reset()
    (joint,) = joints
    for node in joint.graph.find_nodes(op="placeholder")[len(values) :]:
        values.append(torch.randn(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype))
    return joint, values


@functools.cache
def prepared(name: str) -> tuple[fx.GraphModule, list[Any], PlacementGraph, list[Rule | None], list[torch.Tensor]]:
    """The normalized graph, its inputs, the planner's view of it, the rules, and what one device returns."""
    gm, values = traced(name)
    normalize(gm, compat.fake_mode_of(gm))
    kinds = {n.name: "batch" for n in gm.graph.find_nodes(op="placeholder")}
    (output,) = gm.graph.find_nodes(op="output")
    returned = [n for n in output.all_input_nodes]
    flat = [n for n in compat.pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
    outputs = [(n, None) for n in flat if isinstance(n.meta.get("val"), torch.Tensor)]
    assert returned
    graph, rules = build_placement_graph(gm, kinds, outputs, lambda node: 0.0)
    torch.manual_seed(1)
    whole = fx.Interpreter(gm).run(*values)
    return gm, values, graph, rules, [x for x in compat.pytree.tree_leaves(whole) if isinstance(x, torch.Tensor)]


def pieces(x: torch.Tensor, factors, layout, groups) -> torch.Tensor:
    """What the rank at `groups.coordinates` holds: cut axis by axis, outer axes first."""
    rows = [list(row) for row in factors]
    for place, n, k in zip(layout, groups.sizes, groups.coordinates):
        if isinstance(place, tuple):
            dim, factor = place
            shape = list(x.shape)
            shape[dim] //= n
            apart = x.reshape(*x.shape[:dim], *rows[dim], *x.shape[dim + 1 :])
            x = apart.chunk(n, dim + factor)[k].reshape(shape)
            rows[dim][factor] //= n
    return x.contiguous()


def check(name: str, sizes: tuple[int, ...], seed: int) -> tuple[int, int]:
    gm, values, graph, rules, expected = prepared(name)
    decision = decide(graph, sizes, random.Random(seed))
    groups = mesh_groups(sizes)
    by_name = {v.name: v for v in graph.values if v.producer is None}
    placeholders = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    graphs, inputs = [], []
    for place in groups:
        graphs.append(shard(gm, graph, rules, decision, place, compat.fake_mode_of(gm)).graph)
        inputs.append([
            pieces(x, by_name[n].factors, decision.inputs[by_name[n].index], place) if n in by_name else x
            for n, x in zip(placeholders, values)
        ])
    torch.manual_seed(1)
    results = [
        [x for x in compat.pytree.tree_leaves(out) if isinstance(x, torch.Tensor)] for out in run(graphs, groups, inputs)
    ]
    for k, whole in enumerate(expected):
        value, layout = graph.values[graph.outputs[k][0]], decision.outputs[k].target
        for rank, place in enumerate(groups):
            torch.testing.assert_close(
                results[rank][k], pieces(whole, value.factors, layout, place), rtol=1e-4, atol=1e-6, equal_nan=True,
                check_stride=False, msg=lambda m, k=k, rank=rank: f"{name} {sizes} seed {seed}, output {k}, rank {rank}: {m}",
            )
    split = sum(any(isinstance(p, tuple) for lay in (*o.inputs, *o.made) for p in lay) for o in decision.operations.values())
    return split, len(decision.operations)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_training_step_gives_what_one_device_gives(name, sizes):
    split, operations = check(name, sizes, seed=len(name))
    assert split > operations / 4
