"""Pass: choose which activations to save under a memory budget."""
from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION, PARTITIONER_CHOICE, STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.checkpoint_search import BudgetTooSmall, choose_saved
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.checkpointing.layers.layer_unfolding import counts_alike
from passes.registry import register
from passes.simulation.memory.memory_breakdown import report_memory
from passes.simulation.memory.memory_trace import MemoryTrace
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit


@register
@dataclass(frozen=True)
class SolveCheckpointing(AnalysisPass):
    """Writes `CHECKPOINT_DECISION`: the least time in which a call of the graph holds at most `budget_bytes` besides its
    inputs, and leaves `between_bytes` of them to others between forward and backward, and `after_bytes` after
    backward.

    strict: raise `BudgetTooSmall` if nothing fits; otherwise the answer is the lowest peak found. Raises
    `LayersDiffer` if layers cannot be folded. allowance: replaces the options' time limit. alike: equal layers save the same
    values, where that fits.
    """

    name = "solve_checkpointing"
    requires = (STORAGE_PROGRAM, PARTITIONER_CHOICE)
    provides = (CHECKPOINT_DECISION,)

    budget_bytes: float = float("inf")
    options: SolverOptions = SolverOptions()
    strict: bool = True
    between_bytes: int = 0
    after_bytes: int = 0
    allowance: WorkLimit | None = field(default=None, repr=False, compare=False)
    alike: bool = False

    def run(self, graph_module: GraphModule) -> None:
        cut = read(PARTITIONER_CHOICE, graph_module)
        program = replace(read(STORAGE_PROGRAM, graph_module), between_bytes=self.between_bytes, after_bytes=self.after_bytes)
        named = {storage.name: s for s, storage in enumerate(program.storages)}
        suggested = frozenset(named[name] for name in cut if name in named) & frozenset(program.candidates)
        start = time.perf_counter()
        try:
            walked = choose_saved(program, self.budget_bytes, self.options, [suggested], self.allowance, self.alike).walk
        except BudgetTooSmall as error:
            if self.strict or error.walk is None:
                raise
            walked = error.walk
        if walked.program.stand_ins and not counts_alike(walked):
            raise LayersDiffer("a few layers count other bytes than all of them")
        write(CHECKPOINT_DECISION, graph_module, decision_of_trace(walked, self.budget_bytes, time.perf_counter() - start))


def decision_of_trace(walked: MemoryTrace, budget_bytes: float, seconds: float) -> CheckpointDecision:
    """Convert a memory trace to an annotation."""
    walked, program = walked.without_unread, walked.program
    return CheckpointDecision(
        frozenset(program.storages[s].name for s in walked.saved), sum(program.layers_again[k] for k in walked.recomputed),
        sum(map(program.us_of, walked.recomputed)), max(walked.forward.nbytes, default=0),
        max(walked.backward.nbytes, default=0),
        program.bytes_of(walked.saved - walked.offloaded | program.returned), budget_bytes, seconds,
        frozenset(program.storages[s].name for s in walked.offloaded), program.bytes_of(walked.offloaded),
        sum(map(program.offload_us_of, walked.offloaded)), report_memory(walked), walked.after)


@register
@dataclass(frozen=True)
class AdoptCheckpointing(AnalysisPass):
    """Writes `CHECKPOINT_DECISION` as decided elsewhere for the same graph."""

    name = "adopt_checkpointing"
    provides = (CHECKPOINT_DECISION,)

    kept: CheckpointDecision = CheckpointDecision(frozenset(), 0, 0.0, 0, 0, 0, float("inf"), 0.0)

    def run(self, graph_module: GraphModule) -> None:
        write(CHECKPOINT_DECISION, graph_module, self.kept)
