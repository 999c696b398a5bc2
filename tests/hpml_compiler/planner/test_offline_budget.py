"""Plans under a byte budget, without a run -> the decision of a run, and its proven bound."""
from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.offline_planner import OfflinePlanner
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.checkpointing_records import OffloadedValue
from hpml_compiler.simulate import simulate
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster
from passes.solver.work_limit import WorkLimit
from tests.hpml_compiler.compile.test_budget import ROWS, WIDTH, Block, Deep, two_ranks
from tests.passes.traced import transformer

X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin()
EAGER = {"compiler": "eager", "costs": "roofline"}


def planned(cluster: str = "1x1:cpu", **options):
    return hpml_compiler.plan(Deep(), (X,), cluster=cluster, **EAGER, **options)


def run(options, model: nn.Module | None = None):
    """The plan of a step on one device."""
    hpml_compiler.reset()
    torch.compile(model or Deep(), backend="hpml", options={**EAGER, "cluster": "1x1:cpu", **options})(X)
    return hpml_compiler.last_plan()


@pytest.fixture(scope="module")
def needs():
    """Bytes that a step holds where they are no limit."""
    return planned(memory_budget="1GiB").peak.bytes


@pytest.fixture(scope="module")
def tight(needs):
    """A plan of one device that runs something again."""
    return planned(memory_budget=int(0.7 * needs))


def test_one_device_keeps_what_it_keeps_in_a_run(needs, tight):
    budget = int(0.7 * needs)
    ran = run({"memory_budget": budget})
    assert tight.peak == ran.peak and tight.peak.bytes <= budget
    (graph,), (ran_graph,) = tight.graphs, ran.graphs
    assert graph.kept == ran_graph.kept and graph.kept.again and graph.solver.bound == ran_graph.solver.bound
    assert graph.memory.peak == tight.peak.bytes and graph.memory.activations == graph.kept.saved_bytes
    assert list(ran.seconds) == ["trace", "solve", "compile forward"], "backward is compiled when it is first called"


def test_a_budget_that_is_too_small_is_refused_with_one_that_works(needs):
    with pytest.raises(Infeasible) as caught:
        planned(memory_budget=needs // 3)
    least = caught.value.smallest_budget_bytes
    assert least is not None and "fewer rows" in caught.value.next_step
    assert planned(memory_budget=round(least)).peak.bytes <= round(least)


def test_the_optimizer_is_counted_with_what_its_step_makes(needs):
    adam, sgd = (planned(memory_budget="1GiB", optimizer=name) for name in ("adamw", "sgd"))
    state = adam.memory.optimizer
    assert sgd.memory.optimizer == 0 and state == 2 * adam.memory.parameters
    makes = [plan.graphs[0].kept.step_bytes - plan.memory.parameters - plan.memory.optimizer - plan.memory.gradients
             for plan in (adam, sgd)]
    assert makes == [3 * 4 * WIDTH * 4 * WIDTH, 0], "on a CPU one parameter after another, the largest counts"


def test_ranks_are_planned_in_trials_without_process_groups(needs):
    wide = planned("1x2:cpu", memory_budget="1GiB", mesh={"dp": 2})
    tight = planned("1x2:cpu", memory_budget=int(0.85 * wide.peak.bytes), mesh={"dp": 2})
    assert tight.peak.bytes <= 0.85 * wide.peak.bytes
    (before,), (after,) = wide.graphs, tight.graphs
    assert after.solver.bound is not None and after.solver.cost >= after.solver.bound
    assert after.kept.again_us + after.predicted.step_time_us >= before.predicted.step_time_us


@pytest.mark.parametrize(("cluster", "copies"), [("1x2:cpu", True), ("1x2:h100-80g", False)])
def test_collectives_take_what_they_do_on_the_clusters_devices_wherever_the_model_was_traced(cluster, copies):
    options = Options.parse({**EAGER, "memory_budget": "1GiB", "mesh": {"dp": 2}, "zero": 3})
    traces, planner = TracedModel(Deep(), (X,), options), OfflinePlanner(options, Cluster.parse(cluster), {})
    (annotated,), (traced,) = traces.whole, traces.traced
    trial = DryRun(planner.problem("graph", traced, annotated, WorkLimit(30)))
    program = read(STORAGE_PROGRAM, trial.problem(plan_graph(annotated, options, planner.cluster)).gm)
    assert any(run.workspace_bytes for run in program.runs) == copies


def test_the_simulator_plays_what_is_kept(needs, tight):
    wide = planned(memory_budget=needs)
    before, after = (simulate(plan, overlap=False) for plan in (wide, tight))
    again_us = tight.graphs[0].kept.again_us
    assert after.step_us - before.step_us == pytest.approx(again_us - wide.graphs[0].kept.again_us, rel=1e-6)
    assert any(event.kind == "recompute" for event in after.events)
    for plan, found in ((wide, before), (tight, after)):
        assert found.peak_bytes == pytest.approx(plan.peak.bytes, rel=0.1)


def test_the_simulator_copies_what_is_offloaded(tight):
    (graph,) = tight.graphs
    first = next(name for name in graph.kept.saved if name in graph.operations)
    away = {name: OffloadedValue(block=graph.operations[first].block, bytes=4096, predicted_us=us)
            for name, us in ((first, 100.0), ("a node that the plan does not list", 40.0))}
    moved = tight.model_copy(update={"graphs": (graph.model_copy(update={
        "kept": graph.kept.model_copy(update={"offloaded": away})}),)})
    before, after = (simulate(plan, overlap=False) for plan in (tight, moved))
    copies = [event.stop_us - event.start_us for event in after.events if event.kind == "offload"]
    assert sorted(copies) == pytest.approx([20.0, 20.0, 50.0, 50.0])
    assert after.step_us - before.step_us == pytest.approx(140.0)


@pytest.mark.parametrize("megabytes", [30, 22])
def test_of_layers_that_stand_for_others_it_is_decided_what_all_keep(megabytes):
    """The same bytes, and nearly the same time, as of the whole model: what is found in a few seconds differs a little."""
    model, batch = transformer(512, 64, 4, 10, rows=8, length=64)
    few, whole = (hpml_compiler.plan(model, batch, cluster="1x1:h100-80g", memory_budget=megabytes * 10**6, **EAGER,
                                     trace_all_layers=each) for each in (False, True))
    assert few.graphs[0].multiplicity and not whole.graphs[0].multiplicity
    ours, theirs = few.graphs[0], whole.graphs[0]
    assert ours.kept.gradient_bytes == theirs.kept.gradient_bytes
    assert ours.memory.parameters == theirs.memory.parameters and ours.memory.optimizer == theirs.memory.optimizer
    assert few.peak.bytes <= megabytes * 10**6 >= whole.peak.bytes
    assert ours.kept.again_us <= 1.25 * theirs.kept.again_us + 5
    values = [*ours.kept.saved.values()]
    assert sum(value.bytes * value.layers for value in values) <= ours.kept.saved_bytes, "which has the loss, too"
    assert max(value.layers for value in values) >= 4
    for plan in (few, whole):
        assert simulate(plan, overlap=False).step_us == pytest.approx(plan.predicted.step_time_us, rel=1e-3)


def test_layers_that_stand_for_others_go_through_in_microbatches():
    """Calls of backward that read forward's values alone belong to their layer, so that layers are alike in the loop, too."""
    model, batch = transformer(512, 64, 4, 10, rows=8, length=64)
    few, whole = (hpml_compiler.plan(model, batch, cluster="1x2:h100-80g", memory_budget="14MB", mesh={"dp": 2}, microbatches=2,
                                     **EAGER, trace_all_layers=each) for each in (False, True))
    (ours,), (theirs,) = few.graphs, whole.graphs
    assert ours.multiplicity and ours.kept is not None and ours.microbatches is not None, "it is decided what is saved"
    assert ours.kept.gradient_bytes == theirs.kept.gradient_bytes and ours.memory.parameters == theirs.memory.parameters
    assert few.peak.bytes <= 14 * 10**6 >= whole.peak.bytes
    assert ours.predicted.step_time_us == pytest.approx(theirs.predicted.step_time_us, rel=0.02)
    assert simulate(few, overlap=False).step_us == pytest.approx(few.predicted.step_time_us, rel=0.01)


def test_where_layers_are_not_run_alike_the_log_says_that_nothing_is_decided(caplog):
    """Gradients of small layers share a bucket, which is reduced when several layers are over."""
    model, batch = transformer(64, 32, 2, 9, rows=4, length=8)
    with caplog.at_level(logging.INFO, "hpml"):
        plan = hpml_compiler.plan(model, batch, cluster="1x2:cpu", memory_budget="1GiB", **EAGER)
    assert (plan.graphs[0].kept is None) == ("trace_all_layers=True" in caplog.text)


def test_a_saved_plan_pins_what_is_kept(needs, tight, tmp_path, caplog):
    tight.save(tmp_path / "plan.json")
    with caplog.at_level(logging.INFO, "hpml"):
        obeyed = run({"plan": str(tmp_path / "plan.json")})
    assert "as in the given plan" in caplog.text and "solve_checkpointing: wrote" not in caplog.text, "nothing is decided"
    assert obeyed.graphs[0].kept == tight.graphs[0].kept and obeyed.peak == tight.peak
    caplog.clear()
    with caplog.at_level(logging.INFO, "hpml"):
        tighter = run({"plan": tight, "memory_budget": int(0.65 * needs)})
    assert "hpml decides them again" in caplog.text and tighter.peak.bytes <= 0.65 * needs
    roomy = run({"plan": tight, "memory_budget": 2 * needs})
    assert roomy.graphs[0].kept.saved == tight.graphs[0].kept.saved


def test_two_ranks_obey_a_plan_that_was_made_without_them(launch, tmp_path):
    def plan(budget):
        return hpml_compiler.plan(Deep(0.1), (X,), cluster="1x2:cpu", mesh={"dp": 2}, memory_budget=budget, **EAGER)

    made = plan(int(0.85 * plan("1GiB").peak.bytes))
    made.save(tmp_path / "plan.json")
    assert made.graphs[0].kept.again
    first, second = launch(two_ranks, args=({"plan": str(tmp_path / "plan.json")},))
    assert "as in the given plan" in first[1] and "solve_checkpointing: wrote" not in first[1], "rank 0 decides nothing"
    assert max(first[2], second[2]) <= 1.03 * made.peak.bytes


def test_a_plan_that_keeps_something_else_is_refused(tight):
    (graph,) = tight.graphs
    value = next(iter(graph.kept.saved.values()))
    kept = graph.kept.model_copy(update={"saved": {**graph.kept.saved, "nothing": value}})
    wrong = tight.model_copy(update={"graphs": (graph.model_copy(update={"kept": kept}),)})
    with pytest.raises(BadInput, match="finds no nothing"):
        hpml_compiler.plan(Deep(), (X,), cluster="1x1:cpu", plan=wrong, **EAGER)


def test_a_plan_of_another_model_is_refused(tight):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(0.0)

        def forward(self, x):
            return self.block(x).square().mean()

    with pytest.raises(Exception, match="another model or batch"):
        run({"plan": tight}, Other())
