"""What is kept for backward: at the least cost in time, so that a step never holds more than so many bytes.

The program of `passes.checkpointing.checkpoint_ilp` proposes, a walk along the tape counts, and small changes, each counted by
a walk, mend what the program could not know. So an answer never holds more than the walk says; that it is the fastest is not
proven.
"""
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from passes.checkpointing import checkpoint_ilp
from passes.checkpointing.layer_folding import split_layers
from passes.checkpointing.peak_moves import can_lower_peak
from passes.errors import Infeasible
from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from passes.simulation.memory.storage_program import StorageProgram
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
ROUNDS = 6
"""How often a program is built around the answer before, at most."""
MOST_WALKED, LEAST_WALKED = 1_500_000, 150_000
"""Runs that all walks together pass, or twice as many where values can be offloaded; and, however little is left, those that
see what more can be kept. Counted, not timed, so that the answer does not depend on what else the machine does: some 7 s."""
MOST_NODES, MOST_SECONDS, GAP = 100, 10.0, 0.02
"""Of one program's search, which need not be solved closer than this: what it says is an estimate. Most take a single node
and a tenth of a second."""
TIGHTER = 0.5
"""How much of what an answer holds beyond the budget is taken off the budget of the next round."""

PAIRS_OF = 24
"""Of how many storages, the largest, every pair is tried."""


class BudgetTooSmall(Infeasible):
    """Nothing fits. walk: what holds least of what is looked at whatever the budget is."""

    def __init__(self, what: str, where: str = "", next_step: str = "", walk: MemoryTrace | None = None) -> None:
        super().__init__(what, where, next_step)
        self.walk = walk


@dataclass(frozen=True)
class CheckpointSolution:
    """An answer. walk: along the tape with what it keeps. seconds: that finding it took; solves: programs solved."""

    walk: MemoryTrace
    seconds: float
    solves: int

    @property
    def storages(self) -> frozenset[int]:
        return self.walk.kept

    @property
    def offloaded(self) -> frozenset[int]:
        return self.walk.offloaded


def choose_saved(tape: StorageProgram, budget_bytes: float, options: SolverOptions | None = None,
                 suggested: Iterable[frozenset[int]] = (), allowance: WorkLimit | None = None) -> CheckpointSolution:
    """Storages to keep. suggested: what others would keep; the first of them is taken where it fits. allowance: in place of the
    options' time limit.

    Raises BudgetTooSmall, with the least number of bytes that was found to work.
    """
    options = options or SolverOptions()
    search = _CheckpointSearch(tape, budget_bytes, options, allowance or WorkLimit(options.seconds))
    for kept in suggested:
        if search.look(kept).peak <= budget_bytes:
            return search.answer()
    least = search.look(frozenset(s for s in tape.candidates if not tape.runs[tape.maker(s)].inlined))
    search.improve(offloading=False)
    if tape.offloadable:  # a program of its own: it is twice as large, and finds less in its time
        search.improve(offloading=True)
    if search.best() is None:  # from where no budget has led: what is named as the least is found again
        least = search.shrink(least)
    if search.best() is None:
        search.shrink(search.least())
    best = search.best()
    if best is None:
        raise BudgetTooSmall(
            f"a call of this graph holds {least.peak} bytes at least besides its inputs, whatever is computed once "
            f"more{' or offloaded' if tape.offloadable else ''}, where {max(budget_bytes, 0):.0f} are left", "memory_budget",
            "give more bytes, fewer rows or more devices",
            least)
    search.keep_more(best)
    return search.answer() if not tape.stand_ins else _shared_out(search, search.answer())


def _shared_out(search: _CheckpointSearch, kept: CheckpointSolution) -> CheckpointSolution:
    """Where layers stand for several: as many as fit of the kind that takes less time, and then again what more can be kept."""
    walked = split_layers(kept.walk, search.budget_bytes)
    if walked is kept.walk:
        return kept
    other = _CheckpointSearch(walked.tape, search.budget_bytes, search.options, search.allowance)
    other.left = max(search.left, LEAST_WALKED)
    other.keep_more(other.look(walked.kept, walked.offloaded))
    return replace(other.answer(), seconds=time.perf_counter() - search.start, solves=search.solves)


class _CheckpointSearch:
    def __init__(self, tape: StorageProgram, budget_bytes: float, options: SolverOptions, allowance: WorkLimit):
        self.tape, self.budget_bytes, self.allowance = tape, budget_bytes, allowance
        # A wrong answer, which HiGHS's presolve has been seen to give, is no danger here: every answer is walked.
        # To begin again at the root, where variables were fixed, takes as long as these small programs do.
        own = {"presolve": "on", "mip_max_nodes": MOST_NODES, "mip_allow_restart": False} if options.solver == "HiGHS" else {}
        self.options = replace(options, gap=max(options.gap, GAP), extra={**own, **options.extra})
        self.left = MOST_WALKED * (2 if tape.offloadable else 1)
        self.told = False
        self.start, self.solves = time.perf_counter(), 0
        self.walks: dict[checkpoint_ilp.Choice, MemoryTrace] = {}
        self.at_least: dict[checkpoint_ilp.Choice, int] = {}
        """Bytes that others hold, which were not walked to their end."""
        self.solved: dict[tuple[checkpoint_ilp.Choice, float | None, bool], checkpoint_ilp.Choice | None] = {}

    @property
    def is_over(self) -> bool:
        if not self.told and self.allowance.is_over:
            self.told = True
            log.info("the search for what is kept was cut short by the time limit: with more time it may find what is faster "
                     "or holds less")
        return self.left <= 0 or self.told

    def answer(self) -> CheckpointSolution:
        best = self.best()
        assert best is not None, "something fits"
        return CheckpointSolution(best, time.perf_counter() - self.start, self.solves)

    def look(self, kept: frozenset[int], offloaded: frozenset[int] = frozenset()) -> MemoryTrace:
        choice = self._choice(kept, offloaded)
        if choice not in self.walks:
            self._count()
            self.walks[choice] = simulate_memory(self.tape, *choice)
        return self.walks[choice]

    def look_below(self, other: MemoryTrace, kept: frozenset[int], offloaded: frozenset[int]) -> MemoryTrace | None:
        """None if it holds no less than `other`, which most do and half a walk tells."""
        choice = self._choice(kept, offloaded)
        if choice in self.walks:
            return self.walks[choice] if self.walks[choice].peak < other.peak else None
        if self.at_least.get(choice, 0) >= other.peak:
            return None
        self._count()
        tried = simulate_memory(self.tape, *choice)
        if tried.holds_less_than(other):
            self.walks[choice] = tried
            return tried
        self.at_least[choice] = other.peak
        return None

    def _count(self) -> None:
        self.left -= len(self.tape.runs)
        self.allowance.spend("run", len(self.tape.runs))

    def _choice(self, kept: frozenset[int], offloaded: frozenset[int]) -> checkpoint_ilp.Choice:
        kept = kept - self.tape.never_kept
        return kept, offloaded & kept

    def best(self) -> MemoryTrace | None:
        """The fastest that fits."""
        fitting = [each for each in self.walks.values() if each.peak <= self.budget_bytes]
        return min(fitting, key=lambda each: (each.us, each.peak), default=None)

    def least(self) -> MemoryTrace:
        """What holds least."""
        return min(self.walks.values(), key=lambda each: (each.peak, each.us))

    def improve(self, offloading: bool) -> None:
        """Solve, walk, and solve again around the answer."""
        around, within = self.best() or self.least(), self.budget_bytes
        for _ in range(ROUNDS):
            choice = self._solve(around, within, offloading)
            if choice is None:  # there is none by these rows; an answer of less than all can be built around
                choice = self._solve(around, None, offloading)
            if choice is None or choice in self.walks:
                return
            around = self.look(*choice)
            over = around.peak - self.budget_bytes
            within = self.budget_bytes if over <= 0 else max(within - TIGHTER * over, 0.5 * self.budget_bytes)

    def _solve(self, around: MemoryTrace, within: float | None, offloading: bool = True) -> checkpoint_ilp.Choice | None:
        program = (around.kept, around.offloaded), within, offloading and bool(self.tape.offloadable)
        if program not in self.solved:
            if self.is_over:
                return None
            self.solves += 1
            self.solved[program] = checkpoint_ilp.solve(around, within, self.options, self.allowance.part(
                min(self.allowance.left_s, MOST_SECONDS)), offloading)
        return self.solved[program]

    def shrink(self, least: MemoryTrace) -> MemoryTrace:
        """Down from there until it fits, or to the end: by programs that look for less still, then one storage at a time."""
        for _ in range(ROUNDS):
            choice = self._solve(least, None)
            if choice is None or self.look(*choice).peak >= least.peak:
                break
            least = self.look(*choice)
        while least.peak > self.budget_bytes and (lower := self._step_down(least)) is not None:
            least = lower
        return least

    def _step_down(self, least: MemoryTrace) -> MemoryTrace | None:
        """One storage more or less, or two, or one elsewhere, so that the peak is lower; None if there is no such change."""
        largest, matter = self._largest_first(), can_lower_peak(least)
        changes = ({s} for s in largest), itertools.combinations(largest[:PAIRS_OF], 2)
        kept = ((least.kept ^ frozenset(change), least.offloaded)
                for change in itertools.chain(*changes) if not matter.isdisjoint(change))
        elsewhere = sorted((self.tape.offloadable - least.offloaded) & matter, key=lambda s: -self.tape.storages[s].nbytes)
        for choice in itertools.chain(((least.kept | {s}, least.offloaded | {s}) for s in elsewhere), kept):
            if self.is_over:
                return None
            if (tried := self.look_below(least, *choice)) is not None:
                return tried
        return None

    def _largest_first(self) -> list[int]:
        bound = self.tape.bound_to_keep | self.tape.never_kept
        free = (s for s in self.tape.candidates if s not in bound)
        return sorted(free, key=lambda s: -self.tape.storages[s].nbytes)

    def keep_more(self, best: MemoryTrace) -> None:
        """As long as it fits: what saves most time for its bytes first."""
        runs, storages = self.tape.runs, self.tape.storages
        more = [s for s in self.tape.candidates if s not in best.kept and self.tape.maker(s) in set(best.again)]
        more.sort(key=lambda s: -runs[self.tape.maker(s)].us / max(storages[s].nbytes, 1))
        for s in more:
            best = self._better(best, best.kept | {s}, best.offloaded)
        for s in sorted(best.offloaded, key=lambda s: -storages[s].offload_us / max(storages[s].nbytes, 1)):
            best = self._better(best, best.kept, best.offloaded - {s})
            best = self._better(best, best.kept - {s}, best.offloaded - {s})

    def _better(self, best: MemoryTrace, kept: frozenset[int], offloaded: frozenset[int]) -> MemoryTrace:
        if self.is_over:
            return best
        tried = self.look(kept, offloaded)
        return tried if tried.peak <= self.budget_bytes and tried.us < best.us else best
