"""Choose which activations to save: at the least cost in time, so that the peak of a step stays within a budget.

The program of `passes.checkpointing.checkpoint_ilp` proposes, a memory trace counts, and small changes, each counted by
a trace, correct estimates of the program. So the trace of an answer never exceeds the budget; that the answer is the fastest
is not proven.
"""
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from passes.checkpointing import checkpoint_ilp
from passes.checkpointing.layers.equal_layers import decide_alike, equal_layers
from passes.checkpointing.layers.layer_folding import split_layers
from passes.checkpointing.peak_moves import can_lower_peak
from passes.errors import Infeasible
from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from passes.simulation.memory.storage_program import StorageProgram
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
ROUNDS = 6
"""Limit of programs, each built around the previous answer."""
MOST_WALKED, LEAST_WALKED = 1_500_000, 150_000
"""Limit of ops in all traces together, twice as many with offloading; and the minimum left for saving more. Counted, not timed,
so that the answer does not depend on the load of the machine: some 7 s."""
MOST_NODES, MOST_SECONDS, GAP = 100, 10.0, 0.02
"""Time limit of one program, which need not be solved exactly: its figures are estimates. Most take a single node
and a tenth of a second."""
TIGHTER = 0.5
"""Fraction of an answer's excess over the budget that the next round's budget is reduced by."""

PAIRS_OF = 24
"""Number of largest storages of which every pair is tried."""


class BudgetTooSmall(Infeasible):
    """Nothing fits. walk: the trace with the lowest peak found, whatever the budget."""

    def __init__(self, what: str, where: str = "", next_step: str = "", walk: MemoryTrace | None = None) -> None:
        super().__init__(what, where, next_step)
        self.walk = walk


@dataclass(frozen=True)
class CheckpointSolution:
    """An answer. walk: its memory trace. seconds: time of the search; solves: programs solved."""

    walk: MemoryTrace
    seconds: float
    solves: int

    @property
    def storages(self) -> frozenset[int]:
        return self.walk.saved

    @property
    def offloaded(self) -> frozenset[int]:
        return self.walk.offloaded


def choose_saved(program: StorageProgram, budget_bytes: float, options: SolverOptions | None = None,
                 suggested: Iterable[frozenset[int]] = (), allowance: WorkLimit | None = None,
                 alike: bool = False) -> CheckpointSolution:
    """Storages to save. suggested: choices by others; the first of them is taken if it fits. allowance: replaces the
    options' time limit. alike: equal layers save the same values, in at most two variants, where that fits.

    Raises BudgetTooSmall, with the smallest number of bytes that was found to work.
    """
    options = options or SolverOptions()
    search = _CheckpointSearch(program, budget_bytes, options, allowance or WorkLimit(options.seconds))
    for kept in suggested:
        if search.look(kept).peak <= budget_bytes:
            return search.answer()
    least = search.look(frozenset(s for s in program.candidates if not program.runs[program.maker(s)].inlined))
    search.improve(offloading=False)
    if program.offloadable:  # a separate program: it is twice as large, and finds less in its time
        search.improve(offloading=True)
    if search.best() is None:
        search.start_from_layers(least)
    if search.best() is None:  # without the budget, so that the reported minimum is reproducible
        least = search.shrink(least)
    if search.best() is None:
        search.shrink(search.least())
    best = search.best()
    if best is None:
        raise BudgetTooSmall(
            f"a call of this graph needs at least {least.peak} bytes besides its inputs, even with recomputation"
            f"{' and offloading' if program.offloadable else ''}; {max(budget_bytes, 0):.0f} are left", "memory_budget",
            "give more bytes, fewer rows or more devices",
            least)
    search.keep_more(best)
    if program.stand_ins:
        return _shared_out(search, search.answer())
    return search.answer_alike() if alike else search.answer()


def _shared_out(search: _CheckpointSearch, kept: CheckpointSolution) -> CheckpointSolution:
    """With folded layers: give as many layers as fit the faster of the two variants, then save more again."""
    walked = split_layers(kept.walk, search.budget_bytes)
    if walked is kept.walk:
        return kept
    other = _CheckpointSearch(walked.program, search.budget_bytes, search.options, search.allowance)
    other.left = max(search.left, LEAST_WALKED)
    other.keep_more(other.look(walked.saved, walked.offloaded))
    return replace(other.answer(), seconds=time.perf_counter() - search.start, solves=search.solves)


class _CheckpointSearch:
    def __init__(self, program: StorageProgram, budget_bytes: float, options: SolverOptions, allowance: WorkLimit):
        self.program, self.budget_bytes, self.allowance = program, budget_bytes, allowance
        # HiGHS's presolve may give wrong answers, which do no harm here: every answer is traced.
        # A restart at the root, after fixing variables, takes as long as these small programs do.
        own = {"presolve": "on", "mip_max_nodes": MOST_NODES, "mip_allow_restart": False} if options.solver == "HiGHS" else {}
        self.options = replace(options, gap=max(options.gap, GAP), extra={**own, **options.extra})
        self.left = MOST_WALKED * (2 if program.offloadable else 1)
        self.reported = False
        self.start, self.solves = time.perf_counter(), 0
        self.walks: dict[checkpoint_ilp.Choice, MemoryTrace] = {}
        self.at_least: dict[checkpoint_ilp.Choice, int] = {}
        """Lower bounds of the peaks whose traces were not completed."""
        self.solved: dict[tuple[checkpoint_ilp.Choice, float | None, bool], checkpoint_ilp.Choice | None] = {}

    @property
    def is_over(self) -> bool:
        if not self.reported and self.allowance.is_over:
            self.reported = True
            log.info("the checkpointing search was cut short by the time limit; raise time_limit to find a faster or smaller "
                     "solution")
        return self.left <= 0 or self.reported

    def answer(self) -> CheckpointSolution:
        best = self.best()
        assert best is not None, "something fits"
        return CheckpointSolution(best, time.perf_counter() - self.start, self.solves)

    def answer_alike(self) -> CheckpointSolution:
        found = self.answer()
        return replace(found, walk=decide_alike(found.walk, self.budget_bytes, self.look),
                       seconds=time.perf_counter() - self.start)

    def look(self, kept: frozenset[int], offloaded: frozenset[int] = frozenset()) -> MemoryTrace:
        choice = self._choice(kept, offloaded)
        if choice not in self.walks:
            self._count()
            self.walks[choice] = simulate_memory(self.program, *choice)
        return self.walks[choice]

    def look_below(self, other: MemoryTrace, kept: frozenset[int], offloaded: frozenset[int]) -> MemoryTrace | None:
        """None if its peak is not below that of `other`, which is usual and takes half a trace."""
        choice = self._choice(kept, offloaded)
        if choice in self.walks:
            return self.walks[choice] if self.walks[choice].peak < other.peak else None
        if self.at_least.get(choice, 0) >= other.peak:
            return None
        self._count()
        tried = simulate_memory(self.program, *choice)
        if tried.holds_less_than(other):
            self.walks[choice] = tried
            return tried
        self.at_least[choice] = other.peak
        return None

    def _count(self) -> None:
        self.left -= len(self.program.runs)
        self.allowance.spend("run", len(self.program.runs))

    def _choice(self, kept: frozenset[int], offloaded: frozenset[int]) -> checkpoint_ilp.Choice:
        kept = kept - self.program.never_saved
        return kept, offloaded & kept

    def best(self) -> MemoryTrace | None:
        """The fastest that fits."""
        fitting = [each for each in self.walks.values() if each.peak <= self.budget_bytes]
        return min(fitting, key=lambda each: (each.us, each.peak), default=None)

    def least(self) -> MemoryTrace:
        """The one with the lowest peak."""
        return min(self.walks.values(), key=lambda each: (each.peak, each.us))

    def improve(self, offloading: bool) -> None:
        """Solve, trace, and solve again around the answer."""
        around, within = self.best() or self.least(), self.budget_bytes
        for _ in range(ROUNDS):
            choice = self._solve(around, within, offloading)
            if choice is None:  # infeasible by these rows; restart from an answer with a lower peak
                choice = self._solve(around, None, offloading)
            if choice is None or choice in self.walks:
                return
            around = self.look(*choice)
            over = around.peak - self.budget_bytes
            within = self.budget_bytes if over <= 0 else max(within - TIGHTER * over, 0.5 * self.budget_bytes)

    def start_from_layers(self, around: MemoryTrace) -> None:
        """Let equal layers save the same values, at the least those that they hand on, as where a script checkpoints each of
        them, and improve that: the program's answers around other choices may all hold more."""
        decide_alike(around, self.budget_bytes, self.look)
        if self.best() is not None:
            self.improve(offloading=bool(self.program.offloadable))

    def _solve(self, around: MemoryTrace, within: float | None, offloading: bool = True) -> checkpoint_ilp.Choice | None:
        problem = (around.saved, around.offloaded), within, offloading and bool(self.program.offloadable)
        if problem not in self.solved:
            if self.is_over:
                return None
            self.solves += 1
            self.solved[problem] = checkpoint_ilp.solve(around, within, self.options, self.allowance.part(
                min(self.allowance.left_s, MOST_SECONDS)), offloading)
        return self.solved[problem]

    def shrink(self, least: MemoryTrace) -> MemoryTrace:
        """Lower the peak until it fits, or cannot be lowered: by programs with smaller budgets, then one storage at a time."""
        for _ in range(ROUNDS):
            choice = self._solve(least, None)
            if choice is None or self.look(*choice).peak >= least.peak:
                break
            least = self.look(*choice)
        while least.peak > self.budget_bytes and (lower := self._step_down(least)) is not None:
            least = lower
        return least

    def _step_down(self, least: MemoryTrace) -> MemoryTrace | None:
        """Add, drop, swap or move one or two storages, or those of all equal layers, so that the peak falls; None if there is
        no such change."""
        largest, matter = self._largest_first(), can_lower_peak(least)
        changes = ({s} for s in largest), itertools.combinations(largest[:PAIRS_OF], 2)
        places = (frozenset(place).intersection(largest) for layers in equal_layers(self.program) for place in zip(*layers))
        alike = (kept for place in places if place for kept in (least.saved - place, least.saved | place))
        kept = ((choice, least.offloaded) for choice in itertools.chain(
            (least.saved ^ frozenset(change) for change in itertools.chain(*changes) if not matter.isdisjoint(change)), alike))
        storages = self.program.storages
        elsewhere = sorted((self.program.offloadable - least.offloaded) & matter, key=lambda s: -storages[s].nbytes)
        for choice in itertools.chain(((least.saved | {s}, least.offloaded | {s}) for s in elsewhere), kept):
            if self.is_over:
                return None
            if (tried := self.look_below(least, *choice)) is not None:
                return tried
        return None

    def _largest_first(self) -> list[int]:
        bound = self.program.bound_to_keep | self.program.never_saved
        free = (s for s in self.program.candidates if s not in bound)
        return sorted(free, key=lambda s: -self.program.storages[s].nbytes)

    def keep_more(self, best: MemoryTrace) -> None:
        """Save more while it fits: most time per byte first."""
        runs, storages = self.program.runs, self.program.storages
        more = [s for s in self.program.candidates if s not in best.saved and self.program.maker(s) in set(best.recomputed)]
        more.sort(key=lambda s: -runs[self.program.maker(s)].us / max(storages[s].nbytes, 1))
        for s in more:
            best = self._better(best, best.saved | {s}, best.offloaded)
        for s in sorted(best.offloaded, key=lambda s: -storages[s].offload_us / max(storages[s].nbytes, 1)):
            best = self._better(best, best.saved, best.offloaded - {s})
            best = self._better(best, best.saved - {s}, best.offloaded - {s})

    def _better(self, best: MemoryTrace, kept: frozenset[int], offloaded: frozenset[int]) -> MemoryTrace:
        if self.is_over:
            return best
        tried = self.look(kept, offloaded)
        return tried if tried.peak <= self.budget_bytes and tried.us < best.us else best
