"""Gathers and reductions that microbatches repeat -> the least time within a device's memory, as by trying out all choices."""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.gather_choice import GatherChoice
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.microbatching import joint_of_loss, microbatch_placement
from passes.hardware.cluster import Cluster
from passes.presets import annotate
from passes.sharding.loop_gathers import LoopGathers
from passes.solver.exhaustive_search import brute_force
from passes.solver.solvers import SolverOptions
from tests.hpml_compiler.planner.test_offline_budget import EAGER
from tests.passes.traced import mlp, trace_joint, transformer

MICROBATCHES = 4


def choice_of(model: nn.Module, width: int, **options) -> GatherChoice:
    traced = trace_joint(model, torch.randn(2048, width))
    annotated = annotate(joint_of_loss(traced.gm), traced.inputs, traced.forward_outputs, MICROBATCHES)
    times = microbatch_placement(annotated.graph, MICROBATCHES, SolverOptions())
    assert times is not None
    given = Options.parse({"mesh": {"dp": 2}, "zero": 3, "microbatches": MICROBATCHES, "costs": "roofline", **options})
    cluster = Cluster.parse("1x2:a100-80g")
    return GatherChoice(plan_graph(annotated, given, cluster).record, annotated, times, cluster, given)


def test_the_choice_is_that_of_trying_out_all():
    choice = choice_of(mlp(64, 256, 3), 64)
    groups = choice.groups
    assert len(groups) == 4, "gathers and reductions of up and down, of all layers alike"
    rows = []
    for some in chain.from_iterable(combinations(groups, count) for count in range(len(groups) + 1)):
        gathered, reduced = ([name for group in some if group.reduces == reduces for name in group.names]
                             for reduces in (False, True))
        record = choice._counted(LoopGathers(tuple(sorted(gathered)), tuple(sorted(reduced))))
        rows.append((record.memory.peak, record.predicted.communication_us, sum(group.us for group in some)))
    assert all(abs(us - rows[0][1] - more) < 1e-6 * us for _, us, more in rows), "a group's time is what the plan says"
    for limit in sorted({peak for peak, _, _ in rows}):
        _, record = choice.within(limit)
        assert record.memory.peak <= limit
        assert record.predicted.communication_us == pytest.approx(min(us for peak, us, _ in rows if peak <= limit))
        problem, _ = choice.problem(limit)
        assert choice.us(choice.solved(limit)) == pytest.approx(brute_force(problem).cost)


def test_a_pin_leaves_no_choice_of_gathers():
    for pin in ("once", "each"):
        choice = choice_of(mlp(64, 256, 2), 64, gather=pin, zero=3 if pin == "each" else 2)
        (least, _), (most, _) = choice.within(0.0), choice.within(1e12)
        assert bool(least.gathered) == bool(most.gathered) == (pin == "each")
        assert least.reduced and not most.reduced


def test_a_saved_choice_is_obeyed():
    choice = choice_of(mlp(64, 256, 2), 64)
    assert replace(choice, given=choice.all).within(1e12)[0] == choice.all


def test_a_gather_that_repeats_does_so_in_all_layers_of_a_deeper_model():
    model, batch = transformer(64, 32, 2, 8, rows=8, length=16)
    plan = hpml_compiler.plan(model, batch, cluster="1x4:h100-80g", mesh={"dp": 4}, zero=3, gather="each", microbatches=2,
                              memory_budget=10**10, **EAGER)
    (graph,) = plan.graphs
    layers = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in graph.microbatches.gathered)
    assert {count for name, count in layers.items() if ".*." in name} == {8}
