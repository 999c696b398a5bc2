"""Decisions about one step, as data: a run rewrites the graph by them, and a plan records them."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import GraphMemory
from hpml_compiler.plans.pipeline_records import LossChunksPlan
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.decision import Decision, LossChunking, MicrobatchPlacement
from passes.graph.loops.loop_parts import LoopSplit
from passes.json_records import FrozenMap
from passes.pipeline.stage_assignment import StageAssignment
from passes.sharding.loop_gathers import LoopGathers

if TYPE_CHECKING:  # nothing that plans is imported where a graph is read from the graph cache
    from hpml_compiler.planner.graph.step_problem import StepProblem

NO_AXES: FrozenMap[str, int] = FrozenMap({})


@dataclass(frozen=True)
class StepDecision:
    """All decisions about a step, the same on every rank.

    mesh: sizes of its axes in rank order; no axes on one device. placements: of every value on the axes of one stage, with the
    redistributions between them; None where a stage has one rank. microbatches: placements on the microbatch axis, by which an
    operation is in the loop or around it; None with one microbatch. gathers: collectives of sharded parameters that each
    microbatch repeats; None without a loop on devices. schedule, stages: of the pipeline; the stages are None
    without one, and until the loop is cut out, which they are found in. checkpointing: activations that are saved, offloaded,
    or else recomputed; None where the partitioner decides. stage_checkpointing: the same of each stage, once they are cut out.
    loss_chunks: how the loss is computed; None where nothing was asked for, and with stages, of which one rank has the loss.
    pinned: the parts that the user decided.
    """

    mesh: Mapping[str, int] = NO_AXES
    placements: Decision | None = None
    microbatches: MicrobatchPlacement | None = None
    gathers: LoopGathers | None = None
    schedule: str | None = None
    stages: StageAssignment | None = None
    checkpointing: CheckpointDecision | None = None
    stage_checkpointing: tuple[CheckpointDecision, ...] = ()
    loss_chunks: LossChunking | None = None
    pinned: frozenset[str] = frozenset()

    @property
    def microbatch_count(self) -> int:
        return 1 if self.microbatches is None else self.microbatches.microbatches

    @property
    def stage_starts(self) -> tuple[str, ...]:
        """First block of each stage but stage 0."""
        return () if self.stages is None else tuple(blocks[0] for blocks in self.stages.blocks[1:])

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items()) or "one device"
        parts = {"mesh": axes, "placements": self.placements and f"{len(self.placements.operations)} operations",
                 "microbatches": self.microbatches and f"{self.microbatches.microbatches}, with "
                                                       f"{self.microbatches.share:.0%} of the work on batch rows in the loop",
                 "gathers": self.gathers and f"{len(self.gathers.gathered)} parameters gathered and "
                                             f"{len(self.gathers.reduced)} gradients reduced in each microbatch",
                 "stages": self.stages and f"{self.stages.count} under {self.schedule}",
                 "checkpointing": self.checkpointing and f"{len(self.checkpointing.names)} values saved, "
                                                         f"{self.checkpointing.recomputed} calls recomputed",
                 "loss": self.loss_chunks and self.loss_chunks.count > 1 and f"{self.loss_chunks.count} chunks of rows",
                 "stage checkpointing": ", ".join(f"{each.recomputed} calls recomputed" for each in self.stage_checkpointing)}
        return "\n".join(f"{name}: {text} ({'pinned' if name in self.pinned else 'decided'})"
                         for name, text in parts.items() if text)


@dataclass(frozen=True)
class DecidedStep:
    """A decision, and what was made on the way. step: the problem as it was decided. planned: the answer of the placement
    search, where there was one. record: the plan of the step; None where it is made on demand. loop: the microbatch loop, if
    deciding took cutting it out of the analyzed graph already. fullest: under a memory budget, memory of the rank of a planned
    pipeline that holds most."""

    decision: StepDecision
    step: StepProblem | None = field(default=None, repr=False)
    planned: PlanResult | None = None
    record: GraphPlan | None = None
    loop: LoopSplit | None = field(default=None, repr=False)
    fullest: GraphMemory | None = None

    def with_chunks(self, found: LossChunking) -> DecidedStep:
        """The step, now that its loss is rewritten."""
        planned, record = self.planned, self.record and with_chunks(self.record, found)
        planned = planned and replace(planned, record=with_chunks(planned.record, found))
        return replace(self, decision=replace(self.decision, loss_chunks=found), planned=planned, record=record)


def with_chunks(record: GraphPlan, found: LossChunking | None) -> GraphPlan:
    """The record of a step whose loss is computed so."""
    said = found and LossChunksPlan(count=found.count, head=found.head, reason=found.reason)
    return record if said is None else record.model_copy(update={"loss_chunks": said})


def defers_outputs(options: Options) -> bool:
    """True if large outputs beside the loss are computed when the script first reads them, and not in the step. The last stage
    of a pipeline has no hidden states of other ranks, and graphs that are compiled in blocks, or changed by passes that the
    script names, are kept as they are."""
    return options.shards_outputs and options.stage_ranks == 1 and options.compile_blocks != "on" and not options.passes


def decomposes_loss(options: Options) -> bool:
    """True if operators are taken apart even where one device would run them as they are: chunks of a loss need that."""
    return options.loss_chunks not in (1, "auto")


def pinned_by(options: Options) -> frozenset[str]:
    """The parts of a decision that the options pin, without those that a search decided."""
    found = options.chosen
    given = {"mesh": options.mesh is not None and "mesh" not in found, "placements": options.plan is not None,
             "microbatches": options.microbatches > 1 and "microbatches" not in found,
             "stages": options.stage_ranks > 1 and "pp" not in found,
             "gathers": options.gather != "auto" or options.plan is not None,
             "checkpointing": options.plan is not None or bool(options.recompute), "loss": options.loss_chunks != "auto"}
    return frozenset(name for name, pins in given.items() if pins)
