"""Agree on the plan of one graph: all ranks profile their devices, rank 0 plans or loads a plan, and the others receive it."""
from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import PlanResult, plan_graph
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.graph.same_structure import structural_hash
from hpml_compiler.planner.pipeline.pp_axis import same_mesh
from hpml_compiler.planner.search.budget_trials import cached_or_new, cached_or_new_within, plan_by_trials
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.search.fitting_search import FittingSearch, first_answer
from hpml_compiler.planner.search.plan_cache import plan_cache_of
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.plans.unsplit_graph import why_not_split
from hpml_compiler.profile import quick_profile
from hpml_compiler.runtime.consistency.rank_sync import from_rank_0
from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from passes import compat
from passes.errors import BadInput
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")


class RankPlanner:
    """Plans one graph on all ranks together. sharing: the state of the step under a memory budget. cluster: the devices to plan
    for, all by default. fitting: without a budget, the search for a plan that fits in memory; by default one over all devices,
    or the first plan found where `cluster` is given. times: placements on the microbatch axis. allowance: work limit for all of
    the planning. structure: structural hash, on rank 0 once planned, by which later graphs find the plan."""

    def __init__(self, annotated: AnalyzedGraph, inputs: GraphInputs, options: Options, sharing: StepContext | None,
                 forward_outputs: int | None, cluster: Cluster | None = None, fitting: FittingSearch | None = None,
                 allowance: WorkLimit | None = None, times: MicrobatchPlacement | None = None):
        self.annotated, self.inputs, self.options, self.sharing = annotated, inputs, options, sharing
        self.forward_outputs, self.times, self.structure = forward_outputs, times, ""
        self.allowance = allowance or WorkLimit(options.time_limit)
        self.session = session.current()
        everything = local_cluster(options, dist.get_world_size())
        self.cluster = cluster or everything
        self.fitting = FittingSearch(options, everything) if fitting is None and cluster is None else fitting

    def agreed(self) -> PlanResult:
        """The plan, with its Dynamo frame noted. All ranks call this together."""
        planned, record = self.searched()
        return replace(planned, record=record.model_copy(update={"frame": compat.frame_being_compiled()}))

    def searched(self) -> tuple[PlanResult, GraphPlan]:
        """The plan as the search found it, and the record of the step. All ranks call this together."""
        self._look()
        return from_rank_0(self._plan)

    def trial(self, sharing: StepContext) -> DryRun:
        assert self.forward_outputs is not None, "what is kept is kept for backward"
        return DryRun(self.annotated, self.options, self.cluster, self.forward_outputs,
                      self.inputs.kept_gradients(self.annotated, self.forward_outputs), frozenset(self.inputs.written), sharing,
                      times=self.times)

    def _look(self) -> None:
        """Before the first plan, all ranks run the quick profile where there is no other."""
        if self.session.looked:
            return
        self.session.looked = True
        if quick_profile.wanted(self.options, self.cluster, self.annotated.hash()):
            start = time.perf_counter()
            self.session.quick = quick_profile.take_quick_profile(self.annotated, self.cluster)
            self.annotated.seconds["look"] = time.perf_counter() - start

    def _plan(self) -> tuple[PlanResult, GraphPlan]:
        annotated, options, given, pinned = self.annotated, self.options, self.options.load_plan(), None
        within = self.allowance
        if given is not None and annotated.interface.training:
            pinned = given.check(annotated.hash(), torch.__version__, dist.get_world_size()).kept
        names = {p: n for n, p in annotated.interface.positions.items()}
        rows = frozenset(names[p] for p in self.inputs.rows if p in names)
        self.structure = key = structural_hash(annotated, options, rows)
        mesh, quick = self._mesh_in_use(), self.session.quick
        like = self.session.decided.get(key)
        plan = functools.partial(
            plan_graph, annotated, options, self.cluster, fixed_mesh=mesh, name=f"graph_{len(self.session.graphs)}", rows=rows,
            given=given, like=like, quick=quick)
        memory = None
        if given is None and like is None:
            memory = plan_cache_of(annotated, options, self.cluster, quick, mesh, sorted(rows), self.times)
        if self.sharing is not None and self.forward_outputs is not None:
            trial = self.trial(self.sharing)
            planned = plan_by_trials(plan, trial, within, pinned) if memory is None else cached_or_new(memory, plan, trial,
                                                                                                       within)
            record = planned.record if self.fitting is None else self.fitting.finish(planned)
        else:
            search = functools.partial(plan, allowance=within)
            if memory is not None:
                search = functools.partial(cached_or_new_within, memory, plan, within)
            planned, record = first_answer(search) if self.fitting is None else self.fitting(search, hurried=True)
        self.session.decided.setdefault(key, planned.record)
        return planned, record

    def _mesh_in_use(self) -> dict[str, int] | None:
        """The mesh that this graph has to share: that of its placed parameters, or of the graphs before it."""
        mesh = self.inputs.mesh
        if mesh is None or self.options.mesh is None or same_mesh(self.options.mesh, mesh):
            return mesh
        if self.annotated.interface.stored:
            raise BadInput(f"parameters are placed on the mesh {mesh} already, and {self.options.mesh} is asked for",
                           where="options['mesh']", next_step="give one mesh for all that a model is compiled for")
        return None


def enter_plan(record: GraphPlan, options: Options, cluster: str, rejected: Iterable[MeshAttempt], training: bool,
               seconds: Mapping[str, float]) -> dict[str, float]:
    """Enter a plan in the session. seconds: compile time by phase before planning. Returns the plan's own times, with these
    added; later phases are added there, too."""
    solving = record.seconds.get("solve", 0.0)
    record.seconds.update(seconds)
    if solving:
        record.seconds["solve"] = seconds.get("solve", 0.0) + solving
    current = session.current()
    current.enter(record, options, cluster, rejected)
    if not training:
        return record.seconds
    current.mesh = dict(record.mesh)
    if why := why_not_split(record):
        heartbeat.watch_neighbor()
        log.log(logging.DEBUG if dist.get_rank() else logging.WARNING, "%s", why)
    return record.seconds


def say_plan(planned: PlanResult, unruled: Mapping[str, Sequence[str]]) -> None:
    if dist.get_rank() == 0:
        record = planned.record
        log.info("%s: mesh %s, predicted step %.3f ms, planned in %.2f s", record.name, planned.mesh,
                 record.predicted.step_time_us / 1e3, sum(record.seconds.values()))
        say_what_is_whole(unruled)


def say_what_is_whole(unruled: Mapping[str, Sequence[str]]) -> None:
    for target, nodes in unruled.items():
        log.warning("no rule for %s: left whole at %s", target, ", ".join(nodes[:3]))
