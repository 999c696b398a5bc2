"""Build symbolic costs of a plan: trace the model at a few sizes and interpolate, with the plan's placements.

    cost = hpml_compiler.instruments.cost_formulas.formulas(model, batch, cluster="1x4:cpu", mesh={"dp": 2, "tp": 2})
    print(hpml_compiler.instruments.cost_formulas.cost_growth.growth(cost))
    cost.evaluate(batch=64, dp=4).step_time_us       # no new trace
"""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hpml_compiler.instruments.cost_formulas.cost_parts import GraphTerms, parts_of
from hpml_compiler.instruments.cost_formulas.input_sizes import VariedInputs, varied_inputs
from hpml_compiler.instruments.cost_formulas.step_formulas import SymbolicCost
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan, PlanMismatch
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.planner.graph.few_layer_trace import LONG, depth, with_few_layers
from hpml_compiler.planner.graph.graph_planning import zero_of
from hpml_compiler.planner.graph.same_structure import decisions_of
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.from_decision.graph_record import SHORTENED
from hpml_compiler.plans.schema import GraphPlan
from passes.annotations import drop, read
from passes.cost_model.energy_model import capped_cluster
from passes.cost_model.formulas.symbolic_sizes import (
    LINEAR,
    Interpolation,
    NotPolynomial,
    Point,
    SymbolicSizes,
    difference,
    first_points,
    goes_down,
    lattice_points,
)
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import BadInput
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.presets import annotate, deciding
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.search.mesh_placement import MeshPlacement
from passes.sharding.search.mesh_search import SearchConfig
from passes.sharding.search.placement_passes import SEARCH_RESULT
from passes.sharding.search.symbolic_terms import collect_terms
from passes.tracing.joint_trace import trace

log = logging.getLogger("hpml")

_SAME_PRICE = 1e-6


def formulas(
    model: nn.Module, batch: Any, plan: Plan | None = None, *, cluster: str | Cluster | None = None,
    dims: Mapping[str, int] | None = None, **options: Any,
) -> SymbolicCost:
    """Symbolic cost of a plan of `model` on the global `batch`; without `plan` the model is planned first.

    cluster, options: as in `hpml_compiler.plan`; for a given plan, those that it was made with. dims: name -> size of the
    input dims that become symbols (see `varied_inputs`); batch and sequence by default. A dim is not a symbol, and `notes`
    report it, if the model traces to a different graph at other sizes. Raises BadInput if the plan is of another model,
    batch or cluster, and if a size is not a polynomial.
    """
    given = {} if plan is None else plan.options
    parsed = Options.parse({**given, **options, **({"cluster": cluster} if isinstance(cluster, str) else {})})
    parsed = measured_costs.for_given(parsed, cluster)
    if not isinstance(cluster, Cluster):
        cluster = None if cluster is not None or plan is None or "cluster" in options else plan.hardware
    cluster = capped_cluster(cluster or _cluster_of(parsed, 1 if plan is None else plan.world_size), parsed.power_cap)
    traces = TracedModel(model, batch, parsed)
    if plan is None:
        plan = plan_traces(traces, cluster)
    if any(graph.pipeline for graph in plan.graphs):
        raise BadInput("there are no formulas of a step that goes through the stages of a pipeline yet", "formulas",
                       "give a plan without pp; `simulate` prices stages for other clusters")
    source = _Source(model, plan)
    base, shorter = traces.whole if not source.short else [], None
    if source.short and traces.shortened is not None:
        folded, long = traces.shortened
        base, shorter = [long], folded.shorter
    measured = measured_costs.load(parsed, cluster)
    planned = source.planned(base)
    conditions = replace(_conditions(planned, cluster, parsed, measured), shorter=shorter, further=source.further)
    prices = conditions.prices(mesh_from_pin(plan.mesh, cluster))
    answers = [_obeyed(annotated, graph, plan, conditions) for annotated, graph in zip(base, planned)]
    notes = [f"{graph.name}: a byte budget decided what is kept for backward at these sizes; the formulas count all that "
             "may be saved, and nothing that runs once more" for graph in planned if graph.kept]
    notes += [f"{graph.name}: the formulas are of a whole batch at once, and the plan goes through it in "
              f"{graph.microbatches.count} microbatches" for graph in planned if graph.microbatches]
    samples = _sample(source, base, varied_inputs(batch, dims), notes)
    state = TrainingStateModel(optimizer=float(parsed.resident_states))

    def cost() -> SymbolicCost:
        interpolation = Interpolation(tuple(samples.inputs.sizes), tuple(samples.graphs), samples.up)
        bills = []
        for k, (annotated, answer, graph) in enumerate(zip(base, answers, planned)):
            sizes = SymbolicSizes([each[k].graph for each in samples.graphs.values()], interpolation)
            bills.append(GraphTerms(graph.name, parts_of(annotated, answer), collect_terms(answer, sizes, state, prices),
                                    graph.predicted.overhead_us))
        return SymbolicCost(samples.inputs.sizes, dict(plan.mesh), cluster, parsed.optimizer_states, tuple(bills),
                            tuple(notes), measured)

    try:
        return cost()
    except NotPolynomial as error:
        log.info("more sizes have to be traced: %s", error)
    _complete(source, base, samples)
    try:
        return cost()
    except NotPolynomial as error:
        raise BadInput(f"a size of the model is no polynomial in {', '.join(samples.inputs.sizes)}: {error}", "formulas",
                       "give dims in which it grows evenly, or plan at each size") from error


def _cluster_of(options: Options, world: int) -> Cluster:
    return Cluster.parse(options.cluster) if options.cluster else Cluster.local(world, "cpu")


@dataclass
class _Source:
    """Traces a model with all of its layers, or with a few layers if the plan was made so."""

    model: nn.Module
    plan: Plan

    @property
    def short(self) -> bool:
        return any(graph.graph_hash.startswith(SHORTENED) for graph in self.plan.graphs)

    @property
    def further(self) -> int:
        return (depth(self.model) or LONG) - LONG if self.short else 0

    def graphs(self, batch: Any) -> list[AnalyzedGraph]:
        if not self.short:
            return [annotate(t.gm, t.inputs, t.forward_outputs, compiler="inductor") for t in trace(self.model, batch)]
        with with_few_layers(self.model, LONG):
            return [annotate(t.gm, t.inputs, t.forward_outputs, compiler="inductor") for t in trace(self.model, batch)]

    def planned(self, base: Sequence[AnalyzedGraph]) -> list[GraphPlan]:
        """The plan of each graph. Raises PlanMismatch."""
        known = {graph.graph_hash.removeprefix(SHORTENED): graph for graph in self.plan.step_graphs}
        found = [known.get(annotated.hash()) for annotated in base]
        if None in found or len(found) != len(known):
            raise PlanMismatch("the plan is of another model or batch", "formulas", "plan again, or leave out the plan")
        return [graph for graph in found if graph is not None]


def _conditions(planned: Sequence[GraphPlan], cluster: Cluster, options: Options,
                measured: CachedMeasurements | None) -> SearchConfig:
    """Search configuration for pricing a plan's graphs. If checkpointing was decided, not all saved activations have to fit."""
    return SearchConfig(
        cluster, options.objective, options.budget_bytes(cluster.device.memory_bytes), options.optimizer_states,
        zero_of(options, obeys=True), measured, resident_states=options.resident_states,
        lifetimes=MemoryModel(0.0) if any(graph.kept for graph in planned) else STEP_PEAK)


def _obeyed(annotated: AnalyzedGraph, graph: GraphPlan, plan: Plan, conditions: SearchConfig) -> MeshPlacement:
    """The placement that the plan specifies, priced. Raises BadInput if its step time differs from the plan's."""
    deciding(conditions, plan.mesh, decisions_of(graph))(annotated.gm)
    answer = read(SEARCH_RESULT, annotated.gm)
    drop(SEARCH_RESULT, annotated.gm)
    expected = graph.predicted.step_time_us - graph.predicted.overhead_us - graph.predicted.again_us
    if abs(answer.placed.cost.step - expected) > _SAME_PRICE * expected:
        raise BadInput(f"{graph.name} is {expected:.6g} us a step in the plan, and not so on {conditions.cluster}",
                       "formulas", "give the cluster and the options that the plan was made with")
    return answer.placed


@dataclass
class _Samples:
    """Traces by point, the base first. up: lengths (sizes other than the batch) of the points are above the base's."""

    inputs: VariedInputs
    graphs: dict[Point, list[AnalyzedGraph]]
    up: bool


def _sample(source: _Source, base: list[AnalyzedGraph], inputs: VariedInputs, notes: list[str]) -> _Samples:
    """Trace at two more points; dims for which the model traces to a different graph are dropped, lengths before the batch."""
    while inputs.sizes:
        reason = ""
        names, at = tuple(inputs.sizes), tuple(inputs.sizes.values())
        lengths = [n for name, n in inputs.sizes.items() if name != LINEAR]
        for up in (False, True) if lengths and all(map(goes_down, lengths)) else (True,):
            points = first_points(names, at, up)
            try:
                return _Samples(inputs, {at: base, **_trace_at(source, base, inputs, points[1:])}, up)
            except _Different as error:
                reason = str(error)
        name = next((n for n in reversed(inputs.sizes) if n != LINEAR), LINEAR)
        notes.append(f"{name} is no symbol: {reason}")
        inputs = inputs.without(name)
    return _Samples(inputs, {(): base}, True)


class _Different(Exception):
    """The model traces to a different graph, or to none, at another size."""


def _trace_at(source: _Source, base: list[AnalyzedGraph], inputs: VariedInputs, points: Sequence[Point],
              ) -> dict[Point, list[AnalyzedGraph]]:
    found = {}
    for point in points:
        sizes = dict(zip(inputs.sizes, point))
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        try:
            graphs = source.graphs(inputs.at(sizes))
        except BadInput as error:
            raise _Different(f"at {shown}, {error.what.splitlines()[0]}") from error
        if len(graphs) != len(base):
            raise _Different(f"at {shown} there are {len(graphs)} graphs, not {len(base)}")
        for mine, theirs in zip(base, graphs):
            if other := difference(mine.graph, theirs.graph):
                raise _Different(f"at {shown} the graph is another: {other}")
        found[point] = graphs
    return found


def _complete(source: _Source, base: list[AnalyzedGraph], samples: _Samples) -> None:
    """Trace the remaining points of the lattice."""
    inputs = samples.inputs
    points = lattice_points(tuple(inputs.sizes), tuple(inputs.sizes.values()), samples.up)
    try:
        samples.graphs.update(_trace_at(source, base, inputs, [p for p in points if p not in samples.graphs]))
    except _Different as error:
        raise BadInput(f"sizes cannot be interpolated: {error}", "formulas",
                       "give dims that the model takes at any size") from error
