"""Decisions about one graph in a run: restored from the graph cache, or made by `GraphDecisions`."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hpml_compiler.compile.decide.plan_entry import PlanEntry
from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.inputs.pp_mesh import PipelineMesh
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.option_values import equal_ranks
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.step_decision import DecidedStep, StepDecision
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from hpml_compiler.session import session
from passes.analyses.microbatch_dims import fitting_microbatches
from passes.graph.decision import LossChunking
from passes.transforms.loss_chunks.chunk_notes import noting_chunks


class DecidedGraph:
    """sharing: under a memory budget, what the graphs of the step share. entry: the graph's plan in the session. takes:
    metadata of the runtime wrapper, completed on the way. decided: the latest decision."""

    def __init__(self, given: Sequence[Any], inputs: GraphInputs, options: Options, sharing: StepContext | None,
                 entry: PlanEntry):
        self.given, self.inputs, self.options, self.sharing, self.entry = given, inputs, options, sharing, entry
        self.name, self.cluster, self.session = entry.name, entry.cluster, session.current()
        self.stages = PipelineMesh(options.mesh or {}) if options.stage_ranks > 1 else None
        self.alone = world_size() == 1
        self.takes = RuntimeMetadata()
        self.decided = DecidedStep(StepDecision())
        self.microbatches = self._microbatches()
        self.notes: list[LossChunking] = []

    def restore(self, earlier: RuntimeMetadata) -> None:
        """Restore the decisions of an earlier launch."""
        self.takes, self.decided = earlier, DecidedStep(earlier.decision)
        if earlier.decision.loss_chunks is not None:
            self.session.loss_chunks[self.name] = earlier.decision.loss_chunks
        self.inputs.gathered, self.inputs.written = set(earlier.gathered), set(earlier.written)
        if self.sharing is not None and earlier.budgeted is not None:
            self.session.step.graphs[self.sharing.frame] = earlier.budgeted
        if self.stages is not None:  # the restored graphs refer to process groups by name
            self.stages.groups()
        elif earlier.entry is not None:
            self.session.groups(earlier.entry.record.mesh)

    def metadata(self) -> RuntimeMetadata:
        """Metadata for the runtime wrapper, once the graph is compiled."""
        return replace(self.takes, gathered=frozenset(self.inputs.gathered), written=frozenset(self.inputs.written),
                       moved={**self.takes.moved, **self.inputs.moved})

    @contextmanager
    def noting_chunks(self) -> Iterator[None]:
        """Context in which the graph is rewritten, for `note_chunks`."""
        with noting_chunks() as self.notes:
            yield

    def note_chunks(self) -> None:
        """Enter how the loss is computed, as the last rewrite noted it."""
        if not self.notes:
            return
        found = self.session.loss_chunks[self.name] = self.notes[-1]
        if self.stages is None:
            self.decided = self.decided.with_chunks(found)
            self.entry.change(self.decided.record)

    def _microbatches(self) -> int:
        """Number of microbatches of a step: as many as divide the rows that a rank has at the least."""
        inputs, options = self.inputs, self.options
        if options.microbatches == 1 or self.stages is None and not torch.is_grad_enabled():
            return 1
        shapes = [x.shape for x, its in zip(inputs.examples, inputs.described, strict=True) if its.kind == "batch"]
        ranks = world_size() if inputs.rows and isinstance(options.rows, str) else equal_ranks(options)
        return fitting_microbatches(shapes, options.microbatches, ranks, speaks=this_rank() == 0)
