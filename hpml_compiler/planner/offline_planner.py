"""Plan a traced model on a cluster, offline: its graphs are planned one after another, as in a run."""
from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from hpml_compiler.optimizer_transient import transient_of
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.checkpointing.single_device_checkpointing import plan_single_device
from hpml_compiler.planner.decide import OfflineRanks, decide, decide_unpipelined
from hpml_compiler.planner.graph.few_layer_trace import LONG, FewLayerTrace
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext, replicated_memory
from hpml_compiler.planner.graph.microbatching import joint_of_loss
from hpml_compiler.planner.graph.plan_assembly import as_plan
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.graph_boundaries import GraphBoundaries
from hpml_compiler.planner.loss_chunking import loss_chunking
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.stage_warnings import warn_of_empty_stages, warn_without_stages
from hpml_compiler.planner.step_decision import DecidedStep, with_chunks
from hpml_compiler.planner.traced_model import TracedModel, fitting_rows, microbatches_of
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt, UnplannedPart
from hpml_compiler.runtime.process.gc_pause import gc_paused
from passes import compat
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.pipeline.find_stages import TooFewBlocks
from passes.presets import annotate
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace
from passes.transforms.loss_chunks.chunk_notes import noting_chunks

log = logging.getLogger("hpml")


@gc_paused()
def plan_traces(traces: TracedModel, cluster: Cluster, allowance: WorkLimit | None = None) -> Plan:
    """Plan a traced model on a cluster of equal devices. allowance: replaces the options' time limit. Raises BadInput and
    Infeasible."""
    return _planned(traces, cluster, allowance or WorkLimit(traces.options.time_limit), False)


@gc_paused()
def plan_candidate(traces: TracedModel, cluster: Cluster, allowance: WorkLimit) -> Plan:
    """Plan one of many candidates: with fewer trials, and only from a few layers of a deep model. Raises BadInput, Infeasible,
    and DepthsDiffer or LayersDiffer where these do not represent it."""
    return _planned(traces, cluster, allowance, True)


def _planned(traces: TracedModel, cluster: Cluster, allowance: WorkLimit, hurried: bool) -> Plan:
    options = traces.options
    options.check_mesh(cluster.world_size)
    planner = OfflinePlanner(options, cluster, traces.trained, hurried, traces.sharing, traces.quick)
    try:
        records = planner.plan(traces, allowance)
    except Infeasible as error:
        if isinstance(error.plan, GraphPlan):
            error.plan = as_plan([error.plan], planner.rejected, options, cluster)
        raise
    plan = as_plan(records, planner.rejected, options, cluster)
    sizes = {name: p.numel() for name, p in traces.model.named_parameters()}
    return plan.model_copy(update={"unplanned": tuple(
        UnplannedPart(reason=each.reason, where=each.where, parameters=each.parameters, used=each.used,
                      elements=sum(sizes[name] for name in each.parameters)) for each in traces.unplanned)})


class OfflinePlanner:
    """trained: bytes of the model's trained parameters, by name: the optimizer has all of them. graphs: under a budget, memory
    of the graphs planned so far, by name; met: names of their parameters. rejected: meshes that other plans were better
    than. hurried: plan one of many candidates: fewer choices are tried, and where a few layers do not represent the model,
    `DepthsDiffer` is raised. only_graph: of the model, so that it has all stages that are pinned. sharing: of a graph of a run,
    the memory that it shares with others, with its optimizer; quick: see `plan_graph`."""

    def __init__(self, options: Options, cluster: Cluster, trained: Mapping[str, float], hurried: bool = False,
                 sharing: StepContext | None = None, quick: CachedMeasurements | None = None):
        self.options = options.model_copy(update={"plan": options.load_plan()})
        self.cluster, self.trained, self.ranks = cluster, trained, OfflineRanks(cluster.world_size, quick)
        self.hurried, self.sharing = hurried, sharing
        self.graphs: dict[str, GraphMemory] = {}
        self.met: set[str] = set()
        self.rejected: list[MeshAttempt] = []
        self.only_graph = False
        self.boundaries = GraphBoundaries(options.compiler)

    def plan(self, traces: TracedModel, allowance: WorkLimit) -> list[GraphPlan]:
        """Plans of all graphs: of a deep model from the trace of a few of its layers, where that is sound."""
        if traces.shortened is not None:
            folded, annotated = traces.shortened
            self.only_graph = True
            try:
                return [self._of_few_layers(self.problem("graph_0", traces.few, annotated, allowance, folded))]
            except DepthsDiffer as error:
                if self.hurried:
                    raise
                log.info("a few layers do not represent the model (%s); hpml traces all of them", error)
                self.graphs.clear()
                self.met.clear()
        records: list[GraphPlan] = []
        self.only_graph = len(traces.traced) == 1 and not traces.unplanned
        for number, traced in enumerate(traces.traced):
            part = allowance.part(max(allowance.left_s, 0.0) / (len(traces.traced) - number))
            annotated = None if self.options.stage_ranks > 1 else traces.whole[number]
            if records and annotated is not None:
                traced, annotated = self.boundaries.arriving(traced, annotated, records[0].mesh, microbatches_of(annotated))
            step = self.problem(f"graph_{number}", traced, annotated, part)
            records.append(self.record(step if not records else replace(step, fixed_mesh=records[0].mesh)))
        return records

    def _of_few_layers(self, step: StepProblem) -> GraphPlan:
        try:
            return self.record(step)
        except LayersDiffer:
            if self.hurried:
                raise
            log.info("%s: the %d traced layers differ on one rank, so the plan saves all activations; with "
                     "trace_all_layers=True, hpml can recompute some", step.name, LONG)
            return self.record(replace(step, sharing=None, options=self.options))

    def problem(self, name: str, traced: JointTrace, annotated: AnalyzedGraph | None, allowance: WorkLimit,
                folded: FewLayerTrace | None = None) -> StepProblem:
        """annotated: the graph, analyzed for planning; None for stages, which it is analyzed for when needed."""
        count = fitting_rows(traced, self.options) if annotated is None else microbatches_of(annotated)
        step = StepProblem(
            name, lambda: annotated or annotate(joint_of_loss(traced.gm), traced.inputs, traced.forward_outputs, count,
                                                self.options.shards_outputs, self.options.compiler),
            traced.forward_outputs, self.options, self.cluster, allowance, count, traced, folded=folded,
            hurried=self.hurried)
        if count > 1 and folded is None:
            step = replace(step, analyze_full=lambda: annotate(step.joint(), traced.inputs, traced.forward_outputs,
                                                               leaves=self.options.shards_outputs,
                                                               compiler=self.options.compiler))
        if not self.options.chooses_saved:
            return step
        sharing = self._sharing(step)
        gradients = tuple(step.outputs + k for k, position in enumerate(step.annotated.interface.positions.values())
                          if position in traced.leaves)
        return replace(step, options=sharing.options, kept_gradients=gradients, sharing=sharing,
                       written=frozenset(compat.mutated_inputs(traced.gm)), device=self.cluster.device.kind)

    def record(self, step: StepProblem) -> GraphPlan:
        """The plan of one graph. Raises Infeasible, with the smallest budget that is known to work, and `DepthsDiffer` or
        `LayersDiffer` where a few layers do not represent all."""
        with noting_chunks() as notes:
            decided = self._decided(step)
        decision, planned, sharing = decided.decision, decided.planned, step.sharing
        if planned is not None and decision.stages is None:
            self.boundaries.note(step.name, step.annotated, planned.decision)
        if decision.stages is not None:
            warn_of_empty_stages(step.name, decision.stages)
        kept = decision.checkpointing
        record, rejected = decided.record, () if planned is None else planned.rejected
        if decided.fullest is not None:
            self.graphs[step.name] = decided.fullest
        elif sharing is not None and kept is not None:
            held = sharing.replicated if planned is None else DryRun(step, decision.microbatches).memory(planned)
            self.graphs[step.name] = replace(held, saved=kept.saved_bytes)
        if record is None:
            assert kept is not None, "one device is planned at once without a budget"
            single = plan_single_device(step.annotated, kept, step.options, self.cluster, step.name, step.folded,
                                        decision.microbatches)
            record, rejected = single.record, single.rejected
        self.rejected += rejected if self.options.stage_ranks == 1 else ()
        return record if self.hurried else with_chunks(record, loss_chunking(step, decided, notes))

    def _decided(self, step: StepProblem) -> DecidedStep:
        try:
            return decide(step, self.ranks)
        except TooFewBlocks as error:
            if self.hurried or self.only_graph:
                raise
            warn_without_stages(step.name, error.what)
            traced = step.traced
            assert traced is not None, "all graphs were traced"
            return decide_unpipelined(
                replace(step, analyze=lambda: annotate(step.joint(), traced.inputs, traced.forward_outputs,
                                                       leaves=self.options.shards_outputs,
                                                       compiler=self.options.compiler)), self.ranks)

    def _sharing(self, step: StepProblem) -> StepContext:
        """Step context of a graph after the graphs planned before it."""
        options, annotated, traced = self.options, step.annotated, step.traced
        options = options.model_copy(update={"memory_budget": memory_limit(options, self.cluster)})
        if self.sharing is not None:
            return replace(self.sharing, options=options)
        own = {annotated.interface.names[value.name]: value for value in annotated.graph.values if value.kind == "parameter"}
        new = [value for parameter, value in own.items() if parameter not in self.met]
        self.met.update(own)
        trained, frozen = ([float(value.bytes) for value in new if value.trainable == wanted] for wanted in (True, False))
        if step.folded is not None:  # this graph has all parameters of the model
            trained = list(self.trained.values())
            self.met.update(self.trained)
        unseen = sum(nbytes for parameter, nbytes in self.trained.items() if parameter not in self.met)
        return StepContext(replicated_memory(step.name, trained, frozen, options), options,
                           transient_of(options, self.cluster.device.kind), step.name, self.graphs, unseen,
                           traced is not None and traced.breaks, 0.0 if traced is None else traced.copied)
