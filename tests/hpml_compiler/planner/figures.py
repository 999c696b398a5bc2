"""Checks that all figures which a plan is shown with agree."""
from __future__ import annotations

import pytest

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate import simulate
from hpml_compiler.visualize.formatting import format_bytes, format_us
from hpml_compiler.visualize.memory_explanation import memory_json, memory_text


def check_figures(plan: Plan) -> None:
    found, summary, table = simulate(plan), plan.summary_json(), " ".join(plan.table(200).split())
    _bytes(plan, found, summary, table)
    for graph in plan.step_graphs:
        _times(graph, table)
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


def _times(graph: GraphPlan, table: str) -> None:
    solver, cost = graph.solver, graph.predicted
    assert format_us(cost.step_time_us) in table
    if solver.bound is None:
        assert solver.status == "feasible" and solver.gap is None
    else:
        assert solver.bound <= solver.cost * (1 + 1e-9)
    if solver.cost is not None and solver.objective == "time":
        assert solver.cost == pytest.approx(cost.step_time_us, rel=1e-6)
    assert cost.again_us == pytest.approx(0.0 if graph.kept is None else graph.kept.again_us + graph.kept.offload_us)
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
    assert max(stage.memory_bytes for stage in graph.pipeline.stages) <= plan.peak.bytes
