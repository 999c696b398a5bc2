"""Plan a traced model under a memory budget, offline: its graphs are planned one after another, as in a run."""
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.checkpointing.checkpointing_choice import with_checkpointing
from hpml_compiler.planner.checkpointing.single_device_checkpointing import (
    checkpoint_single_device,
    keep_in_loop,
    plan_single_device,
)
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.graph_planning import PlanResult, plan_graph
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext, replicated_memory
from hpml_compiler.planner.graph.microbatch_estimate import in_time
from hpml_compiler.planner.graph.microbatching import loop_of
from hpml_compiler.planner.search.budget_trials import cached_or_new, plan_by_trials
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.search.fitting_search import memory_limit
from hpml_compiler.planner.search.plan_cache import plan_cache_of
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.simulate.optimizer_transient import transient_of
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.hardware.cluster import Cluster
from passes.sharding.microbatch_axis import MicrobatchPlacement, replicated_decision
from passes.solver.work_limit import WorkLimit
from passes.tracing.joint_trace import JointTrace
from passes.transforms.shard.redistributor import MeshGroups


@dataclass
class OfflineBudget:
    """trained: bytes of the model's trained parameters, by name: the optimizer has all of them. graphs: memory of the graphs
    that are planned already, by name. given: a plan to apply."""

    options: Options
    cluster: Cluster
    trained: Mapping[str, float]
    given: Plan | None = None
    graphs: dict[str, GraphMemory] = field(default_factory=dict)
    allowance: WorkLimit | None = None
    """For all graphs that are still to be planned; None: the options' time limit for each graph."""
    met: set[str] = field(default_factory=set)
    """Names of the parameters of the graphs so far."""

    def plan(self, name: str, traced: JointTrace, annotated: AnalyzedGraph, fixed_mesh: Mapping[str, int] | None,
             folded: FewLayerTrace | None = None, times: MicrobatchPlacement | None = None) -> PlanResult:
        """Plan one graph. traced: before any pass; annotated: the same, analyzed for planning. folded: the deeper model of
        which a few layers were traced. times: placements on the microbatch axis. Raises Infeasible, with the smallest
        budget that is known to work, and `DepthsDiffer` or `LayersDiffer` where these layers do not represent all."""
        sharing = self.sharing(name, traced, annotated, folded)
        pinned = None if self.given is None else self.given.check(
            annotated.hash(), torch.__version__, self.cluster.world_size).kept
        within = self.allowance or WorkLimit(self.options.time_limit)
        if self.cluster.world_size == 1:
            held = sharing.whole
            kept = self._on_one_device(traced, annotated, sharing, pinned, folded, times)
            planned = plan_single_device(annotated, kept, sharing.options, self.cluster, name, folded, times)
        else:
            trial = self.trial(traced, annotated, sharing, folded, times)
            plan = functools.partial(plan_graph, annotated, sharing.options, self.cluster, name=name, given=self.given,
                                     fixed_mesh=fixed_mesh)
            if folded is not None:
                plan = functools.partial(plan, shorter=folded.shorter, further=folded.further)
            if self.given is not None or folded is not None:
                planned = plan_by_trials(plan, trial, within, pinned)
            else:
                memory = plan_cache_of(annotated, sharing.options, self.cluster, None, fixed_mesh, times)
                planned = cached_or_new(memory, plan, trial, within)
            assert planned.kept is not None, "it was tried out"
            kept, held = planned.kept, trial.held(planned)
            record = planned.record if folded is None else folded.of_all_layers(planned.record)
            record = in_time(record, annotated, times, self.cluster, sharing.options)
            planned = replace(planned, record=with_checkpointing(record, kept, sharing.options))
        self.graphs[name] = replace(held, saved=kept.saved_bytes)
        return planned

    def _on_one_device(self, traced: JointTrace, annotated: AnalyzedGraph, sharing: StepContext,
                       pinned: CheckpointingPlan | None,
                       folded: FewLayerTrace | None, times: MicrobatchPlacement | None) -> CheckpointDecision:
        if times is None:
            return checkpoint_single_device(copy_graph(traced.gm), traced.forward_outputs, sharing, self.cluster, pinned,
                                            folded)
        gm = copy_graph(annotated.gm)
        loop = loop_of(gm, annotated.graph, replicated_decision(annotated.graph), times, MeshGroups((), (), ()),
                       traced.forward_outputs, range(traced.forward_outputs, len(returned_nodes(gm))), self.options.compiler)
        return keep_in_loop(gm, loop, times.microbatches, traced.forward_outputs, sharing, self.cluster, pinned, folded)

    def trial(self, traced: JointTrace, annotated: AnalyzedGraph, sharing: StepContext, folded: FewLayerTrace | None = None,
              times: MicrobatchPlacement | None = None) -> DryRun:
        gradients = tuple(traced.forward_outputs + k for k, position in enumerate(annotated.interface.positions.values())
                          if position in traced.leaves)
        return DryRun(annotated, sharing.options, self.cluster, traced.forward_outputs, gradients,
                      frozenset(compat.mutated_inputs(traced.gm)), sharing, self.cluster.device.kind, folded, times)

    def sharing(self, name: str, traced: JointTrace, annotated: AnalyzedGraph,
                folded: FewLayerTrace | None = None) -> StepContext:
        options = self.options.model_copy(update={"memory_budget": memory_limit(self.options, self.cluster)})
        own = {annotated.interface.names[value.name]: value for value in annotated.graph.values if value.kind == "parameter"}
        new = [value for parameter, value in own.items() if parameter not in self.met]
        self.met.update(own)
        trained, frozen = ([float(value.bytes) for value in new if value.trainable == wanted] for wanted in (True, False))
        if folded is not None:  # this graph has all parameters of the model
            trained = list(self.trained.values())
            self.met.update(self.trained)
        unseen = sum(nbytes for parameter, nbytes in self.trained.items() if parameter not in self.met)
        return StepContext(replicated_memory(name, trained, frozen, options), options,
                           transient_of(options, self.cluster.device.kind),
                           name, self.graphs, unseen, traced.breaks)
