"""The stages of a joint graph, one after another in one process."""
from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.op_rules.rule_table import is_random
from passes.pipeline.stage_assignment import StageAssignment
from passes.transforms.cleanup.pre_partition import TagPhases
from passes.transforms.pipeline.stage_graphs import StageGraph
from passes.transforms.pipeline.stage_io import GRADIENT


class _Seeded(fx.Interpreter):
    """Every call that draws random numbers draws those of its name, wherever it runs."""

    def run_node(self, n: fx.Node) -> Any:
        if is_random(n.target):
            torch.manual_seed(zlib.crc32(n.name.encode()))
        return super().run_node(n)


def run(gm: fx.GraphModule, values: dict[str, Any]) -> dict[str, Any]:
    """What a graph returns, by the names of the nodes."""
    results = _Seeded(gm).run(*(values[node.name] for node in gm.graph.find_nodes(op="placeholder")))
    leaves = compat.pytree.tree_leaves(results, is_leaf=lambda x: x is None)
    return {node.name: x for node, x in zip(returned_nodes(gm), leaves, strict=True) if node is not None}


def whole(gm: fx.GraphModule, values: Sequence[Any]) -> list[Any]:
    """What the whole graph returns."""
    return compat.pytree.tree_leaves(_Seeded(gm).run(*values), is_leaf=lambda x: x is None)


def run_stages(graphs: Sequence[StageGraph], gm: fx.GraphModule, values: Sequence[Any], stages: StageAssignment) -> list[Any]:
    """The same from the stages: forward from the first to the last, backward from the last to the first. Each gets what its
    neighbor sends, and nothing else but the inputs of the whole graph; `gm` says only what is returned where."""
    given = {node.name: x for node, x in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True)}
    returned = returned_nodes(gm)
    results: list[Any] = [None] * len(returned)
    halves = [_halves(each) for each in graphs]
    saved: list[dict[str, Any]] = []
    received: dict[str, Any] = {}
    for each, (forward, _) in zip(graphs, halves):
        assert tuple(received) == each.received
        made = run(forward, {**{name: given[name] for name in each.given}, **{name: received[name] for name in each.read}})
        saved.append({**{name: x for name, x in given.items() if name.startswith("tangents")}, **made})
        for k in each.outputs:
            results[k] = made[returned[k].name]
        received = {name: made[name] if name in each.own_sent else received[name] for name in each.sent}
    assert not received
    gradients: dict[str, Any] = {}
    for each, (_, backward), own in reversed(list(zip(graphs, halves, saved))):
        assert tuple(received) == each.received_back
        made = run(backward, {**own, **{GRADIENT + name: received[name] for name in each.read_back}})
        gradients.update(made)
        received = {name: made[name] if name in each.own_sent_back else received[name] for name in each.sent_back}
    assert not received
    for k, node in enumerate(returned):
        if node is not None and results[k] is None:
            parts = [gradients[name] for name in stages.sums.get(node.name, (node.name,))]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            results[k] = total
    return results


def _halves(stage: StageGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    joint = copy_graph(stage.gm)
    TagPhases(stage.forward_outputs)(joint)
    inputs = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    return compat.default_partition(joint, inputs, stage.forward_outputs, None)
