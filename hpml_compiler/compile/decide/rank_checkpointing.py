"""Apply activation checkpointing under a memory budget: as planned, or solved here for graphs without placements."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from hpml_compiler.compile.program.microbatch_autograd import Keeps
from hpml_compiler.planner.checkpointing.checkpoint_problem import tape_of_body
from hpml_compiler.planner.checkpointing.single_device_checkpointing import (
    checkpoint_single_device,
    given_checkpointing,
    keep_in_loop,
)
from hpml_compiler.planner.graph.graph_planning import PlanResult
from hpml_compiler.planner.graph.memory_budget import GraphMemory, StepContext
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.session import session
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_copy import copy_graph
from passes.graph.loops.loop_parts import LoopSplit
from passes.hardware.cluster import Cluster
from passes.presets import annotate, building_storage_program
from passes.tracing.joint_trace import JointTrace

Enter = Callable[[GraphMemory, CheckpointDecision], None]
"""Records a graph's memory on a rank besides saved activations, and the activations it saves."""


@dataclass(frozen=True)
class RankCheckpointing:
    """Activation checkpointing of one graph. cluster: of all ranks. enter: called once it is decided."""

    sharing: StepContext
    cluster: Cluster
    enter: Enter

    def of_trace(self, gm: GraphModule, traced: JointTrace) -> None:
        """Solve it on one rank, or apply a loaded plan; `gm` can be partitioned afterwards. traced: a copy of it."""
        given = lambda: annotate(copy_graph(traced.gm), traced.inputs, traced.forward_outputs).hash()  # noqa: E731
        pinned = given_checkpointing(self.sharing.options, given)
        self.enter(self.sharing.whole, checkpoint_single_device(gm, traced.forward_outputs, self.sharing, self.cluster, pinned))

    def of_plan(self, gm: GraphModule, planned: PlanResult, trial: DryRun) -> None:
        """Apply the plan on several ranks. gm: the rewritten graph."""
        if planned.kept is not None:
            building_storage_program(trial.tape(planned, session.current().groups(planned.mesh)))(gm)
            self.enter(trial.held(planned), planned.kept)

    def in_loop(self, annotated: AnalyzedGraph, microbatches: int, forward_outputs: int, first: bool) -> Keeps:
        """Choose what each microbatch saves, on one rank. first: False when the step is compiled again for gradients at other
        outputs; it is too late then to refuse a graph that does not fit."""
        pinned = given_checkpointing(self.sharing.options, annotated.hash) if first else None

        def keep(marked: GraphModule, loop: LoopSplit) -> CheckpointDecision:
            kept = keep_in_loop(marked, loop, microbatches, forward_outputs, self.sharing, self.cluster, pinned, strict=first)
            if first:
                self.enter(self.sharing.whole, kept)
            return kept

        return keep

    def in_loop_as_planned(self, planned: PlanResult, trial: DryRun) -> Keeps:
        """Apply the plan of several ranks to each microbatch."""
        kept = planned.kept
        assert kept is not None, "under a budget, what is saved is planned"

        def keep(marked: GraphModule, loop: LoopSplit) -> CheckpointDecision:
            tape = trial.tape(planned, session.current().groups(planned.mesh))
            building_storage_program(tape_of_body(marked, loop, tape))(loop.body)
            self.enter(trial.held(planned), kept)
            return kept

        return keep
