"""Plan a traced model, and where that does not fit, search over the decisions that its options leave open."""
from __future__ import annotations

import logging
from operator import attrgetter

from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.microbatching import few_of, loss_of
from hpml_compiler.planner.joint.joint_objective import JointObjective
from hpml_compiler.planner.joint.joint_search import JointSearch
from hpml_compiler.planner.joint.open_decisions import LARGE, OpenDecisions, described_pins, leaves_axes_open
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.analyses.cross_sample_ops import mixing_operations
from passes.analyses.microbatch_dims import rows_of
from passes.errors import Infeasible
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
GAIN = 0.05
"""Part of the step that a search has to gain, or that recomputation takes, where the step fits without the search."""
WAITING, LONG_US = 0.25, 1e6
"""Part of a step that waits for communication, and its time, from which a search for stages or another mesh is worth its time
although the step fits."""


def plan_open(traces: TracedModel, cluster: Cluster) -> Plan:
    """Plan as the options say, and if that does not fit, recomputes much under a memory budget, waits much for communication,
    or if they leave axes of the mesh open, whatever they leave open.
    Raises BadInput and Infeasible."""
    options = traces.options
    if leaves_axes_open(options, cluster.world_size):
        search = joint_search_of(traces, cluster)
        if search is not None and search.decisions.has_meshes:
            log.info("the options pin %s; hpml searches over the rest", described_pins(options))
            return _answer(search)
    options.check_mesh(cluster.world_size)
    try:
        if (short := _too_large(traces, cluster)) is not None:
            raise short
        plan = plan_traces(traces, cluster)
    except Infeasible as refusal:
        search = joint_search_of(traces, cluster, refusal)
        if search is None:
            raise
        log.info("placements alone do not fit: %s; hpml searches over microbatches, recomputation and stages", refusal.what)
        return _answer(search)
    return _with_less_lost(traces, cluster, plan)


def _with_less_lost(traces: TracedModel, cluster: Cluster, plan: Plan) -> Plan:
    """A plan with other microbatches, stages or mesh that is faster, or takes less energy if that is the objective, where this
    one recomputes for `GAIN` of its step under a memory budget, or waits for communication for `WAITING` of a long one; else
    this one."""
    again_us, computed_us, optimizer_us, all_us = (sum(part(graph.predicted) for graph in plan.graphs) for part in (
        attrgetter("again_us"), attrgetter("compute_us"), attrgetter("optimizer_us"), attrgetter("step_time_us")))
    budget, may_wait = traces.options.memory_budget, traces.options.mesh is None and all_us >= LONG_US
    if budget is None and not may_wait:
        return plan
    objective = JointObjective.of(traces.options.objective, cluster, traces.options.power_cap)
    now_us, now = objective.simulated(plan)
    waited_us = now_us - again_us - computed_us - optimizer_us
    recomputes = budget is not None and again_us >= GAIN * now_us
    waits = may_wait and now_us >= LONG_US and waited_us >= WAITING * now_us
    if not (recomputes or waits) or (search := joint_search_of(traces, cluster)) is None:
        return plan
    log.info("recomputation takes %s, and waiting for communication %s, of a step of %s; hpml searches over microbatches and "
             "stages, too", format_us(again_us), format_us(max(waited_us, 0.0)), format_us(now_us))
    search.below = now
    try:
        found = _answer(search)
    except Infeasible as error:
        log.info("no other configuration is faster: %s", error.what)
        return plan
    return found if objective.simulated(found)[1] < now else plan


def _answer(search: JointSearch) -> Plan:
    """The answer of a search: over all layers where a few of them do not represent the model."""
    try:
        return search.run(proves=True)
    except DepthsDiffer as error:
        log.info("a few layers do not represent the model (%s); hpml searches with all of them", error)
    options = search.traces.options.model_copy(update={"trace_all_layers": True})
    whole = joint_search_of(search.traces.with_options(options), search.cluster, search.refusal)
    if whole is None:  # all layers make several graphs
        raise search.refusal
    whole.below = search.below
    return whole.run(proves=True)


def joint_search_of(traces: TracedModel, cluster: Cluster, refusal: Infeasible | None = None) -> JointSearch | None:
    """The search over what the options leave open; None where that is nothing, or where the model is no single training graph.
    refusal: why planning without it failed."""
    options = traces.options
    single = _single_graph(traces, memory_limit(options, cluster))
    if single is None or not single[1].interface.training:
        return None
    folded, annotated = single
    decisions = OpenDecisions(options, cluster, rows_of(annotated.graph.values), _large_shapes(annotated),
                              loss_of(annotated.gm) is not None, mixing_operations(annotated.graph))
    if not decisions.any:
        return None
    if decisions.mixed and decisions.microbatches_are_open:
        log.warning("rows of the batch depend on each other at %s: hpml plans without microbatches and stages",
                    few_of(decisions.mixed))
    refusal = refusal or Infeasible("no configuration was planned", "graph_0", "use more devices")
    return JointSearch(traces, decisions, annotated, folded, refusal, WorkLimit(options.time_limit))


def _large_shapes(annotated: AnalyzedGraph) -> list[tuple[int, ...]]:
    """Shapes of the parameters that are worth splitting."""
    parameters = [value for value in annotated.graph.values if value.kind == "parameter"]
    largest = max((value.bytes for value in parameters), default=0)
    return [tuple(value.spec.shape) for value in parameters if value.bytes >= LARGE * largest]


def _single_graph(traces: TracedModel, limit: int) -> tuple[FewLayerTrace | None, AnalyzedGraph] | None:
    """The only graph of the model, with the whole batch at once, or the few layers that stand for it, and how many more there
    are, traced as for a plan within `limit` bytes; None where the model has several, or parts that were not traced."""
    options = traces.options
    update = {"microbatches": 1} if options.chooses_saved else {"microbatches": 1, "memory_budget": limit}
    plain = traces.with_options(options.model_copy(update=update))
    if plain.shortened is not None:
        return plain.shortened
    return (None, plain.whole[0]) if len(plain.whole) == 1 and not plain.unplanned else None


def _too_large(traces: TracedModel, cluster: Cluster) -> Infeasible | None:
    """The refusal of a step that saves everything at once, where that exceeds all devices together: such a search would only
    find that out after a long time."""
    options = traces.options
    if options.chooses_saved or options.microbatches > 1 or options.stage_ranks > 1 or options.plan is not None:
        return None
    if traces.shortened is None:
        return None
    folded, annotated = traces.shortened
    long, short = (sum(graph.values[v].bytes for v in graph.saved) for graph in (annotated.graph, folded.shorter))
    need = (long + folded.further * (long - short)) / cluster.world_size
    limit = memory_limit(options, cluster)
    if need <= limit:
        return None
    return Infeasible(f"the activations that backward reads take {format_bytes(need)} on each device, even if all of them are "
                      f"sharded over all {cluster.world_size}", "graph_0",
                      "use microbatches, a memory_budget, or more devices")
