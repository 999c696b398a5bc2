"""Activation checkpointing of the stages of a deep model, of which a few layers are traced.

The copies of a piece (`hpml_compiler.planner.pipeline.layer_costs`) in a stage make two runs, and those of a run save the same
values. Each run is a checkpointing problem of its own, decided beside the others as they were decided last.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, equal_shares
from hpml_compiler.planner.graph.memory_budget import BudgetShare
from hpml_compiler.planner.pipeline.stage_memory import RankMemory
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.checkpointing.loop_memory import LoopMemory
from passes.json_records import FrozenMap
from passes.presets import counting_microbatches
from passes.simulation.memory.memory_breakdown import MemoryMoment, MemoryReport
from passes.simulation.memory.storage_program import Microbatches, OtherMicrobatches
from passes.solver.work_limit import WorkLimit

Pieces = Sequence[tuple[int, int]]
"""Pieces of a stage in order, each with how often it is there."""
Run = tuple[int, int]
"""A stage, and a place among its pieces."""


def halved(pieces: Pieces) -> list[tuple[int, int]]:
    """Two runs of each piece that is there more than once."""
    return [(piece, n) for piece, count in pieces for n in (count - count // 2, count // 2) if n]


class SavedValues(NamedTuple):
    """Values that a piece saves, by name, and those of them that are offloaded. ahead: see `CheckpointDecision`."""

    names: frozenset[str]
    offloaded: frozenset[str] = frozenset()
    ahead: bool = True


class LaterBytes(NamedTuple):
    """Bytes of one copy of a piece in backward: of its parameters' gradients, and of values between the parts of a split
    backward."""

    gradients: int
    late: int


@dataclass(frozen=True)
class PieceProblems:
    """The checkpointing problems of the pieces of one rank. stages: its stages and their pieces. joints: graph of each piece,
    with its storage program, and the number of its outputs that are forward's. later: of each piece. allowance: charged with
    the decisions, each of which may take the options' time limit."""

    stages: Mapping[int, Pieces]
    memory: RankMemory
    share: BudgetShare
    around: LoopMemory
    joints: Callable[[int], tuple[GraphModule, int]]
    later: Callable[[int], LaterBytes]
    name: str
    options: Options
    allowance: WorkLimit | None = None

    def decided(self, sweeps: int, fits: Callable[[Mapping[Run, SavedValues]], bool]) -> dict[Run, SavedValues]:
        """The values that each run saves. sweeps: limit of rounds; fits: whether all stages fit."""
        runs = [(k, place) for k, pieces in self.stages.items() for place in range(len(pieces))]
        saved = equal_shares(runs, lambda run: self.problem(run, dict.fromkeys(runs, 0)), self.options)
        chosen = dict[Run, SavedValues]()
        for _ in range(sweeps):
            for run in saved:
                within = self.allowance and self.allowance.part(self.options.time_limit)
                kept = self.problem(run, saved).solved(self.options, False, within)
                saved[run] = kept.saved_bytes // self.others(run, saved).in_flight
                chosen[run] = SavedValues(kept.names, kept.offloaded, kept.ahead)
            if fits(chosen):
                break
        return chosen

    def problem(self, run: Run, saved: Mapping[Run, int]) -> CheckpointProblem:
        """saved: bytes that one copy of each run saves for one microbatch."""
        stage, place = run
        joint, forward_outputs = self.joints(self.stages[stage][place][0])
        others = self.others(run, saved)
        counting_microbatches(others)(joint)
        return CheckpointProblem(joint, forward_outputs, self.share, f"{self.name}, stage {stage}",
                                 replace(self.around, others=others))

    def others(self, run: Run, saved: Mapping[Run, int]) -> Microbatches:
        """Memory of other microbatches, and of other pieces of this one, while a copy runs: the last copy of a run, when all
        others save, and in backward the first one, when all others have made gradients."""
        stage, place = run
        totals = {k: sum(count * saved[k, j] for j, (_, count) in enumerate(pieces)) for k, pieces in self.stages.items()}
        among, pieces = self.memory.others(stage, totals), self.stages[stage]
        piece, count = pieces[place]
        rest = totals[stage] - count * saved[run]
        before = sum(n * saved[stage, j] for j, (_, n) in enumerate(pieces[:place]))
        gradients, late = (sum(n * self.later(each)[part] for each, n in pieces[place + 1:]) for part in (0, 1))

        def last(each: OtherMicrobatches, late: int = 0, gradients: int = 0) -> OtherMicrobatches:
            return OtherMicrobatches(each.in_flight * count + count - 1,
                                     each.saved_bytes + each.in_flight * rest + before + late, each.gradient_bytes + gradients)

        def first(each: OtherMicrobatches) -> OtherMicrobatches:
            own = self.later(piece)
            return OtherMicrobatches(
                each.in_flight * count, each.saved_bytes + each.in_flight * rest + before + late + (count - 1) * own.late,
                each.gradient_bytes + gradients + (count - 1) * own.gradients)

        return Microbatches(
            tuple(dict.fromkeys(last(each) for each in among.forward)),
            tuple(dict.fromkeys(moment for each in among.backward for moment in (last(each, late, gradients), first(each)))))


def decision_of_pieces(pieces: Sequence[tuple[CheckpointDecision, int]], forward: MemoryMoment, backward: MemoryMoment,
                       saved_bytes: int, budget_bytes: float) -> CheckpointDecision:
    """The decision of a stage. pieces: the decision of each piece, and how often it is there. forward, backward: the stage's
    peaks. saved_bytes: by one microbatch in the whole stage."""
    names, offloaded, again = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    layers = Counter[str]()
    for kept, count in pieces:
        account = kept.account
        for all_of, own in ((names, account.saved), (offloaded, account.offloaded), (again, account.again)):
            all_of.update({each[0]: each for each in own})
            layers.update({each[0]: count for each in own})
    account = MemoryReport((forward,), (backward,), tuple(names.values()), tuple(offloaded.values()), tuple(again.values()),
                           layers=FrozenMap({name: count for name, count in layers.items() if count > 1}))
    return CheckpointDecision(
        frozenset().union(*(kept.names for kept, _ in pieces)), sum(n * kept.recomputed for kept, n in pieces),
        sum(n * kept.recompute_us for kept, n in pieces), forward.nbytes, backward.nbytes, saved_bytes, budget_bytes, 0.0,
        frozenset().union(*(kept.offloaded for kept, _ in pieces)), sum(n * kept.offloaded_bytes for kept, n in pieces),
        sum(n * kept.offload_us for kept, n in pieces), account, ahead=all(kept.ahead for kept, _ in pieces))
