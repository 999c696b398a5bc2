"""Activation checkpointing of pipeline stages in a run: each stage is decided on one of its ranks, and all ranks learn it."""
from __future__ import annotations

import math
from collections.abc import Mapping

from hpml_compiler.compile.inputs.pp_mesh import PipelineMesh
from hpml_compiler.planner.graph.memory_budget import GraphMemory
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.pipeline.stage_checkpointing import StageCheckpointing, StagedStep
from hpml_compiler.planner.pipeline.stage_halves import StageSplit
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.process.world_group import from_all_ranks
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.runtime.watchdog.store_wait import wait_for_all
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.errors import HpmlError, Infeasible
from passes.hardware.axis import device_axes, fullest_rank

StageSplits = Mapping[int, StageSplit]


def agreed_splits(problem: StepProblem, cut: StagedStep, planned: PlanResult | None, mesh: PipelineMesh,
                  given: GraphPlan | None) -> tuple[tuple[CheckpointDecision, ...], StageSplits, GraphMemory]:
    """The decisions of all stages, how this rank's stages are split, and the memory of the fullest rank. cut: the problem's
    graph in stages. A step that is compiled again, for gradients at other outputs, is not refused any more."""
    groups, place = mesh.groups(), mesh.place()
    found = StageCheckpointing.of(problem, cut, planned, groups)
    decides = groups.coordinates == fullest_rank(device_axes(mesh.axes) if planned is None else planned.decision.axes)
    kept = agreed_decisions(found, place, decides, problem.traced is not None, given)
    return kept, {k: found.split(k, kept[k]) for k in cut.stages_of(place)}, found.fullest(kept)


def agreed_decisions(found: StageCheckpointing, place: int, decides: bool, strict: bool,
                     given: GraphPlan | None = None) -> tuple[CheckpointDecision, ...]:
    """The decisions of all stages, the same on all ranks. place: of this rank in the pipeline. decides: whether it is the one
    of the ranks that share its stages which decides, one with most rows. given: a saved plan to apply. Raises the error of one
    rank on all: where stages do not fit, Infeasible with the budget that all of them need."""
    own: tuple[CheckpointDecision, ...] | HpmlError | None = None
    if decides:
        try:
            own = found.obeyed_or_decided(place, strict, given)
        except HpmlError as error:  # sent to the other ranks, and raised below
            own = error
        except Exception as error:
            own = HpmlError(f"{type(error).__name__}: {error}", f"stages of rank {place}", "see the error on that rank")
            own.__cause__ = error
    with compat.outside_tracing(), activity("waiting for all ranks to decide what their stages save"):
        wait_for_all()
        told = from_all_ranks((place, own))
    errors = {rank: outcome for rank, outcome in told if isinstance(outcome, HpmlError)}
    if errors:
        worst = max(errors, key=lambda rank: _least_budget(errors[rank]))
        raise own if worst == place and isinstance(own, HpmlError) else errors[worst]
    decisions: dict[int, CheckpointDecision] = {}
    for rank, outcome in told:
        if isinstance(outcome, tuple):  # None: of a rank that does not decide
            decisions.update(zip(found.step.stages_of(rank), outcome))
    return tuple(decisions[stage] for stage in sorted(decisions))


def _least_budget(error: HpmlError) -> float:
    """The budget that an error says would do; infinity for another error, which no budget mends."""
    return error.smallest_budget_bytes or 0.0 if isinstance(error, Infeasible) else math.inf
