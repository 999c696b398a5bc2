"""Checks that all figures which a plan is shown with agree."""
from __future__ import annotations

import json

import pytest

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate import simulate
from hpml_compiler.simulate.plan_prices import PlannedPrices
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.visualize.description.module_classes import module_classes
from hpml_compiler.visualize.description.records import COMMUNICATION, COMPUTE, RECOMPUTE, StepSummary
from hpml_compiler.visualize.formatting import format_bytes, format_us
from hpml_compiler.visualize.memory_explanation import memory_json, memory_text
from passes.simulation.memory.step_trace import trace_step


def check_figures(plan: Plan) -> None:
    found, summary, table = simulate(plan), plan.summary_json(), " ".join(plan.table(200).split())
    _bytes(plan, found, summary, table)
    for graph in plan.step_graphs:
        _times(graph, table)
    _loop(plan, summary)
    _description(plan, found, table)
    cost = plan.predicted
    assert cost.step_time_us == pytest.approx(summary["step_time_s"] * 1e6, rel=1e-9)
    assert cost.step_time_us == pytest.approx(sum(graph.predicted.step_time_us for graph in plan.step_graphs), rel=1e-9)
    if summary["bound_s"] is not None:
        assert summary["bound_s"] <= summary["step_time_s"] * (1 + 1e-9)
    assert found.step_us == pytest.approx(
        found.compute_us + found.exposed_communication_us + found.bubble_us + found.optimizer_us, rel=1e-9)
    if all(graph.pipeline is None for graph in plan.step_graphs):
        assert simulate(plan, overlap=False).step_us == pytest.approx(cost.step_time_us, rel=0.02)
    else:
        _stages(plan)


def _bytes(plan: Plan, found, summary, table: str) -> None:
    peak = plan.peak
    assert peak.bytes == sum(peak.parts.values()) == plan.memory.peak == found.peak_bytes
    assert summary["memory_bytes"]["peak"] == memory_json(plan, peak)["peak_bytes"] == peak.bytes
    assert f"peak {format_bytes(peak.bytes)}: " in table
    assert f"peak memory of a device: {format_bytes(peak.bytes)}" in memory_text(plan, peak)
    if len(plan.step_graphs) == 1:
        assert plan.step_graphs[0].memory.peak == peak.bytes


def _loop(plan: Plan, summary) -> None:
    graph = next((each for each in plan.step_graphs if each.pipeline is not None or each.microbatches is not None), None)
    if graph is None:
        expected = None, 1, 1
    elif (pipe := graph.pipeline) is not None:
        expected = pipe.schedule, pipe.virtual_stages, pipe.microbatches
    else:
        expected = None, 1, graph.microbatches.count
    assert tuple(summary[key] for key in ("schedule", "virtual_stages", "microbatches")) == expected


def _times(graph: GraphPlan, table: str) -> None:
    solver, cost = graph.solver, graph.predicted
    assert format_us(cost.step_time_us) in table
    if solver.bound is None:
        assert solver.status == "feasible" and solver.gap is None
    else:
        assert solver.bound <= solver.cost * (1 + 1e-9)
    if solver.cost is not None and solver.objective == "time" and solver.simulated_us is None:
        assert solver.cost == pytest.approx(cost.step_time_us, rel=1e-6)
    again_us = 0.0 if graph.kept is None else graph.kept.again_us + graph.kept.offload_us
    if graph.pipeline is not None:
        again_us = sum(stage.again_us for stage in graph.pipeline.stages) / graph.pipeline.ranks
    assert cost.again_us == pytest.approx(again_us)
    if graph.pipeline is None:
        parts = cost.compute_us + cost.communication_us + cost.optimizer_us + cost.overhead_us + cost.again_us
        assert parts == pytest.approx(cost.step_time_us, rel=1e-9)


def _stages(plan: Plan) -> None:
    (graph,), cost = plan.step_graphs, plan.predicted
    alone = simulate(plan, overlap=False, contention=1.0)
    assert alone.step_us == pytest.approx(cost.step_time_us, rel=1e-9)
    assert alone.compute_us == pytest.approx(cost.compute_us, rel=1e-9)
    assert alone.communication_us == pytest.approx(cost.communication_us, rel=1e-9)
    moved = sum(hop.predicted_us * move.multiplicity for move in graph.redistributions for hop in move.hops if hop.bytes)
    assert cost.communication_us * graph.pipeline.ranks >= moved, "microbatches take no less than a whole batch"
    memory, pipe = graph.memory, graph.pipeline
    resident = [sum(stage.resident_bytes for stage in pipe.stages if stage.rank == rank) for rank in range(pipe.ranks)]
    assert max(resident) == pytest.approx(memory.parameters + memory.gradients + memory.optimizer, abs=4 * len(pipe.stages))


def _description(plan: Plan, played, table: str) -> None:
    """Figures in tables, pictures and pages add up, and are the plan's."""
    found, picture = plan.describe(), plan.graphviz().source
    json.dumps(found.to_json(), allow_nan=False)
    assert found.step_us == plan.predicted.step_time_us and format_us(found.step_us) in picture
    assert found.peak_bytes == sum(found.memory.values()) == plan.peak.bytes
    assert f"peak {format_bytes(found.peak_bytes)}" in picture
    for axis in found.axes:
        assert format_us(axis.communication.us) in table or not axis.communication.us
    for step, graph in zip(found.steps, plan.step_graphs, strict=True):
        assert sum(step.parts.values()) == pytest.approx(step.step_us, rel=1e-6)
        assert all(f"{part} {format_us(us)}" in picture and format_us(us) in table for part, us in step.parts.items())
        assert step.bound is None or graph.solver.cost is None or step.bound <= graph.solver.cost * (1 + 1e-9)
        for each, runs in zip(step.modules, (each.runs for each in module_classes(graph)), strict=True):
            assert (each.compute_us > 0) == any(graph.operations[name].predicted_us for name in runs), each.name
        if graph.pipeline is None:
            _adds_up(step.modules, graph.predicted.compute_us, graph.predicted.communication_us)
            _saved(plan, graph, step)
            continue
        ranks = graph.pipeline.ranks
        for stage in step.stages:
            modules = [each for each in step.modules if each.stage == stage.number]
            _adds_up(modules, stage.parts[COMPUTE], stage.parts[COMMUNICATION])
        for rank in range(ranks):
            own = [stage for stage in step.stages if stage.rank == rank]
            assert sum(sum(stage.parts.values()) for stage in own) == pytest.approx(step.step_us, rel=1e-6)
            assert own[0].peak_bytes <= found.peak_bytes
        assert max(stage.peak_bytes for stage in step.stages) == found.peak_bytes
        computed = sum(stage.parts[COMPUTE] + stage.parts[RECOMPUTE] for stage in step.stages) / ranks
        assert computed == pytest.approx(graph.predicted.compute_us, rel=1e-6) == pytest.approx(played.compute_us, rel=0.02)


def _saved(plan: Plan, graph: GraphPlan, step: StepSummary) -> None:
    """Modules save what the memory's timeline has between forward and backward, and what is held for all microbatches."""
    listed = sum(each.saved_bytes for each in step.modules)
    if graph.kept is None and graph.training:
        trace = trace_step(step_graph(graph, PlannedPrices(graph)), "cpu" if "cpu" in (plan.cluster or "") else "cuda")
        program, before = trace.program, graph.microbatches.before if graph.microbatches else ()
        held = {s for s in program.returned if program.storages[s].name in before}
        gathered = {s for s in program.returned if program.storages[s].gathered}
        saved = program.bytes_of((trace.saved | held) - gathered)
        assert listed == pytest.approx(saved, rel=0.01 if graph.multiplicity else 1e-6, abs=16), "modules save what is saved"
        returned = program.bytes_of(program.returned - trace.saved - held - gathered)
        if len(plan.step_graphs) == 1 and (graph.microbatches is None or graph.microbatches.loss_inside):
            assert plan.peak.parts.get("saved", 0) <= (saved + returned) * (1 + 1e-6) + 16
    elif graph.kept is not None and len(plan.step_graphs) == 1:
        assert plan.peak.parts.get("saved", 0) <= (listed + sum(each.offloaded_bytes for each in step.modules)) * 1.01


def _adds_up(modules, compute_us: float, communication_us: float) -> None:
    assert sum(each.compute_us for each in modules) == pytest.approx(compute_us, rel=1e-6, abs=1e-6)
    assert sum(each.communication_us for each in modules) == pytest.approx(communication_us, rel=1e-6, abs=1e-6)
