"""Checks that all figures which a plan is shown with agree."""
from __future__ import annotations

import pytest

from hpml_compiler.plans.plan import Plan
from hpml_compiler.simulate import simulate
from hpml_compiler.visualize.memory import memory_json, memory_text
from hpml_compiler.visualize.text import format_bytes, format_us


def check_figures(plan: Plan) -> None:
    """Of a plan of one graph."""
    (graph,) = plan.step_graphs
    found, summary, table = simulate(plan), plan.summary_json(), " ".join(plan.table(200).split())
    _bytes(plan, found, summary, table)
    _times(plan, found, summary, table)
    if graph.pipeline is not None:
        assert max(stage.memory_bytes for stage in graph.pipeline.stages) <= plan.peak.bytes


def _bytes(plan: Plan, found, summary, table: str) -> None:
    (graph,), peak = plan.step_graphs, plan.peak
    assert peak.bytes == sum(peak.parts.values()) == plan.memory.peak == graph.memory.peak == found.peak_bytes
    assert summary["memory_bytes"]["peak"] == memory_json(plan, peak)["peak_bytes"] == peak.bytes
    assert f"peak {format_bytes(peak.bytes)}: " in table
    assert f"a device holds {format_bytes(peak.bytes)} when" in memory_text(plan, peak)


def _times(plan: Plan, found, summary, table: str) -> None:
    (graph,) = plan.step_graphs
    solver, cost = graph.solver, plan.predicted
    assert cost.step_time_us == graph.predicted.step_time_us == pytest.approx(summary["step_time_s"] * 1e6, rel=1e-9)
    assert format_us(cost.step_time_us) in table
    if solver.bound is None:
        assert solver.status == "feasible" and solver.gap is None and "bound" not in table
    else:
        again_us = 0.0 if graph.kept is None else graph.kept.again_us + sum(
            value.predicted_us * value.layers for value in graph.kept.offloaded.values())
        assert solver.cost == pytest.approx(cost.step_time_us + again_us, rel=1e-6)
        assert solver.bound <= solver.cost * (1 + 1e-9) and summary["bound_s"] <= summary["step_time_s"] * (1 + 1e-9)
    parts = cost.compute_us + cost.communication_us + cost.optimizer_us + cost.overhead_us
    if graph.pipeline is None:
        assert parts == pytest.approx(cost.step_time_us, rel=1e-9)
        assert simulate(plan, overlap=False).step_us == pytest.approx(cost.step_time_us, rel=0.02)
    else:
        alone = simulate(plan, overlap=False, contention=1.0)
        assert alone.step_us == pytest.approx(cost.step_time_us, rel=1e-9)
        assert alone.compute_us == pytest.approx(cost.compute_us, rel=1e-9)
        assert alone.communication_us == pytest.approx(cost.communication_us, rel=1e-9)
        moved = sum(hop.predicted_us * move.multiplicity for move in graph.redistributions for hop in move.hops if hop.bytes)
        assert cost.communication_us * graph.pipeline.ranks >= moved, "microbatches take no less than a whole batch"
    assert found.step_us == pytest.approx(
        found.compute_us + found.exposed_communication_us + found.bubble_us + found.optimizer_us, rel=1e-9)
