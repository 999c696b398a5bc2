"""Assemble plans from the plans of their graphs, with the one peak memory that all reports use.

Tables, JSON, `explain --memory`, simulations and the monitor read this peak (`hpml_compiler.simulate.memory_timeline`), and it
decides whether a plan fits a device (`hpml_compiler.planner.search.fitting_search`).
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from passes.cost_model.energy_model import capped_cluster
from passes.hardware.cluster import Cluster


def as_plan(graphs: Sequence[GraphPlan], rejected: Sequence[MeshAttempt], options: Options, cluster: Cluster | None) -> Plan:
    """A plan of graphs that share one mesh."""
    mesh = dict(graphs[0].mesh) if graphs else {}
    alike = [graph for graph in graphs if dict(graph.mesh) == mesh]
    plan = _plan([with_peak(graph, options, cluster) for graph in alike], rejected, options, cluster)
    return plan.model_copy(update={"at_peak": _peak_of(plan)}) if _are_counted_together(plan.step_graphs) else plan


def _are_counted_together(graphs: Sequence[GraphPlan]) -> bool:
    return len(graphs) > 1 and not any(graph.pipeline for graph in graphs)


def step_peak_bytes(graphs: Sequence[GraphPlan], options: Options, cluster: Cluster | None) -> int:
    """Peak bytes of a step that runs these graphs."""
    if _are_counted_together(graphs):
        each_counts = [graph.model_copy(update={"frame": ""}) for graph in graphs]
        return _peak_of(_plan(each_counts, [], options, cluster)).bytes
    return max((with_peak(graph, options, cluster).memory.peak for graph in graphs), default=0)


def with_peak(record: GraphPlan, options: Options, cluster: Cluster | None) -> GraphPlan:
    """The graph's plan with the memory peak of a device in a step of this graph alone."""
    if record.at_peak is not None:
        return record
    peak = _peak_of(_plan([record], [], options, cluster))
    return record.model_copy(update={"memory": record.memory.model_copy(update={"peak": peak.bytes}), "at_peak": peak})


def _peak_of(plan: Plan) -> Peak:
    from hpml_compiler.simulate.simulator import peak_of_plan  # here: a plan from the cache has its peak

    return peak_of_plan(plan)


def _plan(graphs: Sequence[GraphPlan], rejected: Sequence[MeshAttempt], options: Options, cluster: Cluster | None) -> Plan:
    mesh = dict(graphs[0].mesh) if graphs else {}
    return Plan(
        torch_version=torch.__version__, world_size=math.prod(mesh.values()), cluster=cluster and str(cluster), mesh=mesh,
        options=options.to_json(), graphs=tuple(graphs), rejected=tuple(rejected),
        hardware=cluster and capped_cluster(cluster, options.power_cap),
    )
