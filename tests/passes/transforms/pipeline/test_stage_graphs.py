"""A joint graph -> one per stage, which together give the same to the last bit, and which serve as any joint graph does."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import fx

from passes.annotations import read
from passes.graph.graph_copy import copy_graph
from passes.graph.planning_keys import OPERATIONS
from passes.hardware.cluster import Cluster
from passes.pipeline.stage_assignment import STAGES
from passes.presets import annotate, finding_stages
from passes.transforms.pipeline.stage_graphs import StageGraph, split_stages
from passes.transforms.pipeline.stage_io import GRADIENT
from tests.passes.op_rules.families.steps import traced
from tests.passes.transforms.stage_runs import run_stages, whole
from tests.passes.transforms.test_random_decisions import Prepared, _tensors, check


@functools.cache
def split(name: str, count: int) -> tuple[fx.GraphModule, tuple[StageGraph, ...]]:
    step = traced(name)[0]
    gm = copy_graph(step.gm)
    annotate(gm, step.inputs, step.forward_outputs)
    finding_stages(count, Cluster.local(1, "cpu").device)(gm)
    return gm, split_stages(gm, step.inputs)


@pytest.mark.parametrize(("name", "count"), [
    ("gpt2", 3),  # a tied table
    ("t5", 4),  # an encoder that each block of the decoder reads, dropout
    ("unet", 3),  # skips
    ("mixtral", 2),  # calls with several results
    ("efficientnet", 4),  # buffers that forward changes
    ("diffusion", 3),  # random numbers that are read in the end
    ("losses", 2),  # gradients that are added up in all orders
])
def test_stages_together_give_what_the_whole_graph_gives(name, count):
    gm, graphs = split(name, count)
    values = traced(name)[0].values
    expected, found = whole(gm, values), run_stages(graphs, gm, values, read(STAGES, gm))
    for k, (a, b) in enumerate(zip(expected, found, strict=True)):
        same = a is b is None or torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        assert same or torch.equal(a.nan_to_num(), b.nan_to_num()), k


def test_a_stage_has_its_own_parameters_and_nodes_are_what_they_were():
    gm, graphs = split("gpt2", 3)
    given = [name for graph in graphs for name in graph.given]
    stages = read(STAGES, gm)
    assert {name for name in given if given.count(name) > 1} == {
        name for name, readers in stages.parameters.items() if len(readers) > 1}
    nodes = {node.name: node for node in gm.graph.nodes}
    for graph in graphs:
        for node in graph.gm.graph.nodes:
            if node.op == "call_function":
                assert node.meta.items() <= nodes[node.name].meta.items() and node.target is nodes[node.name].target
                assert stages.of[node.name] == graph.index or node.name in stages.copied


@pytest.mark.parametrize("name", ["gpt2", "efficientnet"])
def test_a_stage_is_planned_and_rewritten_as_any_graph(name):
    """The middle one: annotated by itself, with the rows of what it receives, and under a random decision on two ranks."""
    gm, graphs = split(name, 3)
    step = traced(name)[0]
    torch.manual_seed(1)
    interpreter = fx.Interpreter(gm, garbage_collect_values=False)
    interpreter.run(*step.values)
    known = {node.name: value for node, value in interpreter.env.items()}
    stage = graphs[1]
    found = annotate(copy_graph(stage.gm), stage.inputs, stage.forward_outputs)
    received = [value for value in found.graph.values if value.name in stage.read]
    assert len(received) == len(stage.read) > 0 and all((0, 0) in value.batch for value in received)
    values = [known[node.name.removeprefix(GRADIENT)] for node in found.gm.graph.find_nodes(op="placeholder")]
    torch.manual_seed(1)
    results = _tensors(fx.Interpreter(found.gm).run(*values))
    check(Prepared(found.gm, values, found.graph, read(OPERATIONS, found.gm).rules, results), (2,), seed=stage.index,
          asks=True)
