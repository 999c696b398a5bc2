"""The graph of each rank of a mesh -> its stages: ranks of one stage do their collectives together, under random decisions."""
from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import fx

from passes import compat
from passes.annotations import read
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.hardware.cluster import Cluster
from passes.pipeline.stage_assignment import STAGES, StageAssignment
from passes.presets import adopting_stages, analyzing_stage_body, annotate, finding_stages
from passes.sharding.search.placement_passes import AdoptPlacements
from passes.transforms.cleanup.pre_partition import TagPhases
from passes.transforms.pipeline.stage_graphs import StageGraph, makers_of_gradients, split_stages
from passes.transforms.pipeline.stage_io import GRADIENT
from passes.transforms.shard.redistributor import MeshGroups
from passes.transforms.shard.spmd_rewrite import Shard
from tests.helpers.axes import axes_of
from tests.passes.op_rules.families.steps import traced
from tests.passes.transforms.random_decisions import decide
from tests.passes.transforms.ranks import cut, groups_of, run


def named(gms: list[fx.GraphModule], groups: list[MeshGroups], values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What graphs of all ranks return, by the names of the nodes."""
    inputs = [[own[node.name] for node in gm.graph.find_nodes(op="placeholder")] for gm, own in zip(gms, values)]
    results = run(gms, groups, inputs)
    return [{node.name: x for node, x in zip(returned_nodes(gm), own, strict=True) if node is not None}
            for gm, own in zip(gms, results)]


def halves(graph: StageGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    joint = copy_graph(graph.gm)
    TagPhases(graph.forward_outputs)(joint)
    fakes = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    return compat.default_partition(joint, fakes, graph.forward_outputs, None)


Values = list[dict[str, Any]]
"""Of each rank, by name."""


def in_stages(stages: list[tuple[StageGraph, ...]], groups: list[MeshGroups], given: Values) -> Values:
    """What all stages make. stages: of each rank."""
    count, known = len(stages[0]), [dict(own) for own in given]
    cut_in_two = [[halves(graph) for graph in own] for own in stages]
    saved = []
    for index in range(count):
        made = named([own[index][0] for own in cut_in_two], groups, known)
        saved.append([{**own, **new} for own, new in zip(known, made)])
        for own, new, graphs in zip(known, made, stages):
            own.update((name, new[name]) for name in graphs[index].own_sent)
    found: Values = [{} for _ in groups]
    back: Values = [{} for _ in groups]
    for index in reversed(range(count)):
        values = [{**own, **{GRADIENT + name: x for name, x in got.items()}} for own, got in zip(saved[index], back)]
        made = named([own[index][1] for own in cut_in_two], groups, values)
        for rank, (new, forward) in enumerate(zip(made, saved[index])):
            found[rank].update({**forward, **new})
            back[rank].update((name, new[name]) for name in stages[rank][index].own_sent_back)
    return found


@pytest.mark.parametrize(("name", "count", "sizes"), [
    ("gpt2", 3, (2, 2)), ("mixtral", 2, (2,)), ("losses", 2, (2,)),
])
def test_stages_of_ranks_together_give_what_their_graphs_give(name, count, sizes):
    step = traced(name)[0]
    gm = copy_graph(step.gm)
    annotated = annotate(gm, step.inputs, step.forward_outputs)
    graph, kinds, groups = annotated.graph, annotated.interface.kinds, groups_of(sizes)
    decision = decide(graph, axes_of(*sizes), random.Random(len(name)))
    by_name = {value.name: value for value in graph.values if value.producer is None}
    gms, stages, given = [], [], []
    agreed: StageAssignment | None = None
    for place in groups:
        own = copy_graph(gm)
        annotate(own, step.inputs, step.forward_outputs)
        AdoptPlacements(decision)(own)
        Shard(place, at_run_time=True)(own)
        analyzing_stage_body(kinds, step.forward_outputs)(own)
        if agreed is None:
            finding_stages(count, Cluster.local(1, "cpu").device)(own)
            agreed = read(STAGES, own)
        else:
            adopting_stages(agreed)(own)
        gms.append(own)
        stages.append(split_stages(own, (), aligned=False))
        given.append({node.name: cut(x, by_name[node.name], decision.inputs[by_name[node.name].index], place)
                      if node.name in by_name else x
                      for node, x in zip(gm.graph.find_nodes(op="placeholder"), step.values, strict=True)})
    torch.manual_seed(1)
    expected = run(gms, groups, [list(own.values()) for own in given])
    torch.manual_seed(1)
    found = in_stages(stages, groups, given)
    assert agreed is not None and {each.source for each in agreed.sent} == set(range(count))
    makers = makers_of_gradients(gms[0])
    for own, made, results in zip(gms, found, expected):
        for k, (node, x) in enumerate(zip(returned_nodes(own), results, strict=True)):
            if node is None or node.op == "placeholder":
                continue
            parts = agreed.sums.get(node.name, (node.name,))
            assert k < step.forward_outputs or len(parts) == len(makers[k - step.forward_outputs])
            total = functools.reduce(torch.add, (made[part] for part in parts)) if len(parts) > 1 else made[parts[0]]
            torch.testing.assert_close(total, x, rtol=1e-9, atol=1e-12, equal_nan=True)
