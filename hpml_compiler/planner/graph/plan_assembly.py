"""Assemble plans from the plans of their graphs, with the one peak memory that all reports use.

Where a memory budget decided what is saved for backward, the peak is counted along a rank's program
(`hpml_compiler.plans.peak_memory`); else the step is simulated (`hpml_compiler.simulate`). Tables, JSON, `explain --memory`,
simulations and the monitor read this peak, and it decides whether a plan fits a device
(`hpml_compiler.planner.search.fitting_search`).
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.peak_memory import counted_peak
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.simulate.peak_moment import simulated_peak
from hpml_compiler.simulate.simulator import steady


def as_plan(graphs: Sequence[GraphPlan], rejected: Sequence[MeshAttempt], options: Options, cluster: str) -> Plan:
    """A plan of graphs that share one mesh."""
    mesh = dict(graphs[0].mesh) if graphs else {}
    alike = [graph for graph in graphs if dict(graph.mesh) == mesh]
    plan = _plan([with_peak(graph, options, cluster) for graph in alike], rejected, options, cluster)
    several = len(plan.step_graphs) > 1 and not any(graph.pipeline for graph in plan.step_graphs)
    return plan.model_copy(update={"at_peak": _peak(plan)}) if several else plan


def with_peak(record: GraphPlan, options: Options, cluster: str) -> GraphPlan:
    """The graph's plan with the memory peak of a device in a step of this graph alone."""
    if record.at_peak is not None:
        return record
    peak = _peak(_plan([record], [], options, cluster))
    return record.model_copy(update={"memory": record.memory.model_copy(update={"peak": peak.bytes}), "at_peak": peak})


def _peak(plan: Plan) -> Peak:
    counted = counted_peak([graph for graph in plan.step_graphs if graph.training])
    return simulated_peak(plan, steady(plan)) if counted is None else counted


def _plan(graphs: Sequence[GraphPlan], rejected: Sequence[MeshAttempt], options: Options, cluster: str) -> Plan:
    mesh = dict(graphs[0].mesh) if graphs else {}
    return Plan(
        torch_version=torch.__version__, world_size=math.prod(mesh.values()), cluster=cluster, mesh=mesh,
        options=options.to_json(), graphs=tuple(graphs), rejected=tuple(rejected),
    )
