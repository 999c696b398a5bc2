"""Whole training steps in microbatches under random decisions, over devices and in time: the outputs and gradients of one
device that has the whole batch at once."""
from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from passes import compat
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import MicrobatchPlacement
from passes.graph.graph_copy import copy_graph
from passes.presets import annotate, to_microbatches
from passes.sharding.microbatch_axis import solve_time_axis, with_time_axis
from passes.transforms.microbatch.loop_split import split_at_markers
from tests.helpers.axes import axes_of
from tests.passes.op_rules.families.steps import steps_of
from tests.passes.op_rules.families.zoo import MODELS
from tests.passes.transforms.loops import random_times, run_loops
from tests.passes.transforms.random_decisions import decide
from tests.passes.transforms.ranks import cut, groups_of

MICROBATCHES = 2


@dataclass(frozen=True)
class Prepared:
    """values: of the inputs, by name; results: what one device returns."""

    annotated: AnalyzedGraph
    values: dict[str, Any]
    results: list[torch.Tensor]
    forward_outputs: int


@functools.cache
def prepared(name: str, number: int = 0) -> Prepared:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    step = steps_of(model, {key: twice(x) for key, x in batch.items()})[number]
    annotated = annotate(step.gm, step.inputs, step.forward_outputs, MICROBATCHES, compiler="inductor")
    names = [node.name for node in step.gm.graph.find_nodes(op="placeholder")]
    torch.manual_seed(1)
    return Prepared(annotated, dict(zip(names, step.values, strict=True)), tensors(fx.Interpreter(step.gm).run(*step.values)),
                    step.forward_outputs)


def tensors(results: Any) -> list[torch.Tensor]:
    return [x for x in compat.pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


def twice(x: Any) -> Any:
    """Twice the rows, the second half other ones."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.cat((x, x.flip(0) if x.dim() == 1 else x.roll(1, -1)))


def check(prepared: Prepared, times: MicrobatchPlacement, sizes: tuple[int, ...], seed: int) -> None:
    graph, values = prepared.annotated.graph, prepared.values
    decision = with_time_axis(decide(graph, axes_of(*sizes), random.Random(seed)), graph, times)
    groups = [place.with_time(MICROBATCHES) for place in groups_of(sizes)]
    by_name = {v.name: v for v in graph.values if v.producer is None}
    loops, inputs = [], []
    for place in groups:
        gm = copy_graph(prepared.annotated.gm)
        to_microbatches(decision, place, prepared.forward_outputs, (), asks=seed == 1)(gm)
        loops.append(split_at_markers(gm, prepared.forward_outputs))
        inputs.append({name: cut(x, by_name[name], decision.inputs[by_name[name].index], place) if name in by_name else x
                       for name, x in values.items()})
    torch.manual_seed(1)
    found = run_loops(loops, groups, inputs, MICROBATCHES)
    for rank, place in enumerate(groups):
        for k, (own, whole) in enumerate(zip(tensors(found[rank]), prepared.results, strict=True)):
            value, layout = graph.values[graph.outputs[k][0]], decision.outputs[k].target
            torch.testing.assert_close(
                own, cut(whole, value, layout, place), rtol=1e-4, atol=1e-6, equal_nan=True, check_stride=False,
                msg=lambda m, k=k, rank=rank: f"{sizes} seed {seed}, output {k}, rank {rank}: {m}")


def targets(prepared: Prepared) -> dict[str, Any]:
    return {node.name: node.target for node in prepared.annotated.gm.graph.nodes}


# Attention, folded images and random numbers; tables and bags, of which the latter stay whole; sums along a sequence.
@pytest.mark.parametrize("name", ["diffusion", "dlrm", "scan"])
def test_random_decisions_over_devices_and_in_time(name):
    model = prepared(name)
    check(model, solve_time_axis(model.annotated.graph, MICROBATCHES), (2,), len(name))
    check(model, random_times(model.annotated.graph, MICROBATCHES, targets(model), random.Random(1)), (2,), 1)


@pytest.mark.parametrize("name", ["llama", "vit", "speech", "scan", "diffusion"])
def test_nearly_all_work_on_rows_is_in_the_loop(name):
    assert solve_time_axis(prepared(name).annotated.graph, MICROBATCHES).share > 0.99
