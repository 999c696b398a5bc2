"""A model traced once, whole or as a few of its equal layers, and planned on clusters of like devices."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.planning.budgeted import Budgeted
from hpml_compiler.planning.plan_graph import Planned, plan_graph
from hpml_compiler.planning.shorten import LONG, SHORT, depth, neighbors, repeated_paths, shortened
from hpml_compiler.plans.plan import Plan
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.graph.placement_graph import PlacementGraph
from passes.machine.cluster import Cluster
from passes.partition.depth import NotLinear
from passes.partition.splice import without
from passes.presets import annotate
from passes.tracing.trace import Traced, trace

log = logging.getLogger("hpml")


class Traces:
    """A model traced on one batch: made when first needed, and then planned on one cluster after another. alone: as one device
    runs it, of which that matters."""

    def __init__(self, model: nn.Module, batch: Any, options: Options, alone: bool = False):
        self.model, self.batch, self.options, self.alone = model, batch, options, alone

    @cached_property
    def traced(self) -> list[Traced]:
        """All graphs of the whole model, under a budget before any pass."""
        return trace(self.model, self.batch, self.options.compiler, self.alone)

    @cached_property
    def whole(self) -> list[Annotated]:
        """The same, ready to be planned."""
        budget = self.options.memory_budget is not None
        return [_annotate(replace(each, gm=copied(each.gm)) if budget else each) for each in self.traced]

    @property
    def trained(self) -> dict[str, float]:
        """Bytes of the parameters that are trained, by name."""
        return {name: float(p.numel() * p.element_size()) for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def shortened(self) -> tuple[PlacementGraph, Annotated, int] | None:
        """Three and four layers of a deep model, and its number of layers; None if that is not worth it."""
        layers = depth(self.model)
        if layers is None or self.options.trace_all_layers or self.options.plan is not None:
            return None
        long = self._cut(LONG)
        if long is None:
            return None
        short = without(long.graph, neighbors(self.model))
        if short is None:
            log.info("the layers of the model are not that much alike that one could be left out: tracing fewer, too")
            traced = self._cut(SHORT)
            if traced is None:
                return None
            short, long.seconds = traced.graph, {k: long.seconds[k] + traced.seconds[k] for k in long.seconds}
        return short, long, layers

    def _cut(self, layers: int) -> Annotated | None:
        """The model with so many layers; None if that is no single graph."""
        with shortened(self.model, layers):
            found = trace(self.model, self.batch, self.options.compiler)
        return _annotate(found[0]) if len(found) == 1 else None


def plan_traces(traces: Traces, cluster: Cluster) -> Plan:
    """Plan what was traced on a cluster of like devices. Raises BadInput and Infeasible."""
    options = traces.options
    options.check_mesh(cluster.world_size)
    given = options.load_plan()
    results = _plan_shortened(traces, options, cluster)
    if results is None:
        results = _plan_whole(traces, options, cluster, given)
    return as_plan([r.record for r in results], [a for r in results for a in r.rejected], options, str(cluster))


def _annotate(traced: Traced) -> Annotated:
    annotated = annotate(traced.gm, traced.inputs, traced.forward_outputs)
    annotated.seconds["trace"] = traced.seconds
    return annotated


def _plan_whole(traces: Traces, options: Options, cluster: Cluster, given: Plan | None) -> list[Planned]:
    results: list[Planned] = []
    budgeted = Budgeted(options, cluster, traces.trained, given) if options.memory_budget is not None else None
    for number, annotated in enumerate(traces.whole):
        if given is not None:
            given.check(annotated.hash(), torch.__version__, cluster.world_size)
        name, mesh = f"graph_{number}", results[0].mesh if results else None
        if budgeted is not None:
            results.append(budgeted.plan(name, traces.traced[number], annotated, mesh))
        else:
            results.append(plan_graph(annotated, options, cluster, name=name, given=given, fixed_mesh=mesh))
    return results


def _plan_shortened(traces: Traces, options: Options, cluster: Cluster) -> list[Planned] | None:
    """Plan a deep model from traces of three and four of its layers; None if that is not sound or not worth it."""
    if traces.shortened is None:
        return None
    short, long, layers = traces.shortened
    try:
        planned = plan_graph(long, options, cluster, name="graph_0", shorter=short, further=layers - LONG)
    except NotLinear:
        log.info("the layers of the model are not alike: tracing all of them")
        return None
    if options.memory_budget is not None:
        log.info("of %d equal layers, %d were traced: all saved values are counted as if none could be computed once more; "
                 "with trace_all_layers=True it is decided what is kept", layers, LONG)
    return [_with_all_parameters(planned, traces.model)]


def _with_all_parameters(planned: Planned, model: nn.Module) -> Planned:
    """Parameters of the layers that were not traced are stored as those of the last one that was."""
    known = planned.record.parameters
    lists = repeated_paths(model)
    complete = {}
    for name, _ in model.named_parameters():
        template = name if name in known else _of_traced_layer(name, lists)
        if template in known:
            complete[name] = known[template]
    return replace(planned, record=planned.record.model_copy(update={"parameters": {**known, **complete}}))


def _of_traced_layer(name: str, lists: Sequence[str]) -> str:
    """The parameter of the last layer that is traced, for one of a layer in one of these lists."""
    for path in lists:
        if name.startswith(f"{path}."):
            _, _, rest = name.removeprefix(f"{path}.").partition(".")
            return f"{path}.{LONG - 1}.{rest}"
    return name


def as_plan(graphs: list, rejected: list, options: Options, cluster: str) -> Plan:
    """A plan of graphs that share one mesh."""
    mesh = dict(graphs[0].mesh) if graphs else {}
    size = 1
    for n in mesh.values():
        size *= n
    return Plan(
        torch_version=torch.__version__, world_size=size, cluster=cluster, mesh=mesh, options=options.to_json(),
        graphs=tuple(g for g in graphs if dict(g.mesh) == mesh), rejected=tuple(rejected),
    )
