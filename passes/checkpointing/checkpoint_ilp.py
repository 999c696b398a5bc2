"""Activation checkpointing as an integer linear ilp, linearized around a memory trace.

Variables
    keep[v] in {0,1}    storage v is saved by forward
        away[v] in {0,1}    storage v is offloaded, where possible
        again[o] in [0,1]   forward op o is recomputed in backward

Objective
    minimize  sum_o us[o] again[o]  +  sum_v save_us[v] keep[v]  +  sum_v offload_us[v] away[v]
    (or `peak` itself, to find its minimum)

Constraints
    (1) read[v]    keep[v] + away[v] + again[maker of v] >= 1             where a backward op reads v
        (2) need[o,v]  keep[v] + away[v] + again[maker of v] >= again[o]      where o, recomputed, reads v
                       (in both without `again` where the maker of v is not repeatable: it has no such variable)
        (3) peak[p]    sum of bytes in memory at moment p <= budget           at moments of forward and backward

When a storage is recomputed, and how long it lives, depends on the other decisions. (3) takes both from the trace that the
program is built around: v counts with keep[v] as long as that trace reads it after p, and with again[maker] or away[v] from
its first read there on (in forward, with away[v] until its last read there). So `passes.checkpointing.checkpoint_search`
solves, traces anew, and solves again. One binary for each storage and one variable for each op: orders smaller than a
program with a variable for every op at every moment (Jain et al., "Checkmate", MLSys 2020).

Where several microbatches are in flight, what is kept counts in (3) for each of the others, too. Where a layer stands for
several, what it takes counts as often, and (3) has a row for the first of them and one for the last
(`passes.simulation.memory.phase_timeline`): the program is as large for any depth.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pulp

from passes.simulation.memory.memory_trace import MemoryTrace
from passes.simulation.memory.phase_timeline import PhaseTimeline
from passes.simulation.memory.storage_program import FoldedLayer, OtherMicrobatches, StorageProgram
from passes.solver.solvers import SolverOptions, rows_of, run
from passes.solver.work_limit import WorkLimit

CLOSE = 0.6
"""Moments below this fraction of the trace's peak, and of the budget, get no row."""
MOST_ROWS = 120


Choice = tuple[frozenset[int], frozenset[int]]
"""Storages that are saved, and those of them that are offloaded."""


@dataclass
class CheckpointILP:
    model: pulp.LpProblem
    keep: dict[int, pulp.LpVariable]
    away: dict[int, pulp.LpVariable]
    again: dict[int, pulp.LpVariable]
    peak: pulp.LpVariable

    def choice(self) -> Choice:
        kept, away = (frozenset(v for v, x in some.items() if (x.varValue or 0.0) > 0.5) for some in (self.keep, self.away))
        return kept | away, away - kept


def solve(around: MemoryTrace, budget_bytes: float | None, options: SolverOptions, allowance: WorkLimit,
          offloading: bool = True,
          ) -> Choice | None:
    """The choice with the least cost in time; without a budget, with the lowest peak. None: infeasible by (3).
    offloading: allow it where possible."""
    ilp = build_checkpoint_ilp(around, budget_bytes, offloading)
    allowance.spend("coefficient", sum(map(len, rows_of(ilp.model))))
    outcome = run(ilp.model, options, integer=True, allowance=allowance, start=False)
    return ilp.choice() if outcome.state in ("optimal", "feasible") else None


def build_checkpoint_ilp(around: MemoryTrace, budget_bytes: float | None, offloading: bool = True) -> CheckpointILP:
    program = around.program
    offloadable = program.offloadable if offloading else frozenset[int]()
    model = pulp.LpProblem("keeping", pulp.LpMinimize)
    runs = sorted({program.maker(v) for v in program.candidates if program.repeatable(v)})
    ilp = CheckpointILP(
        model,
        {v: model.add_variable(f"keep_{v}", 0, int(v not in program.never_saved), pulp.LpInteger) for v in program.candidates},
        {v: model.add_variable(f"away_{v}", cat=pulp.LpBinary) for v in program.candidates if v in offloadable},
        {o: model.add_variable(f"again_{o}", 0, 1) for o in runs},
        model.add_variable("peak", 0),
    )
    us = {**{ilp.again[o]: program.us_of(o) for o in runs},
          **{x: program.save_us_of(v) for v, x in ilp.keep.items()},
          **{x: program.offload_us_of(v) for v, x in ilp.away.items()}}
    if budget_bytes is None:
        unit = max(around.peak, 1)
        model.setObjective(pulp.LpAffineExpression({ilp.peak: 1e3, **{x: 1e-3 * c / _most(us) for x, c in us.items()}}))
    else:
        unit = max(budget_bytes, 1)
        model.setObjective(pulp.LpAffineExpression({x: 1e3 * c / _most(us) for x, c in us.items()}))
        ilp.peak.upBound = 1.0
    _read(ilp, program)
    _need(ilp, program)
    _peak(ilp, around, unit)
    return ilp


def _read(ilp: CheckpointILP, program: StorageProgram) -> None:
    """(1) Storages that backward reads are saved, offloaded or recomputed."""
    for v in program.wanted:
        ilp.model.addConstraint(_there(ilp, program, v) >= 1, f"read_{v}")


def _need(ilp: CheckpointILP, program: StorageProgram) -> None:
    """(2) Operands of recomputed ops are available."""
    for o, again in ilp.again.items():
        for v in program.runs[o].reads:
            if v in ilp.keep:
                ilp.model.addConstraint(_there(ilp, program, v) >= again, f"need_{o}_{v}")


def _there(ilp: CheckpointILP, program: StorageProgram, v: int) -> pulp.LpAffineExpression:
    """Saved or, if possible, offloaded or recomputed."""
    ways = ilp.keep[v], ilp.away.get(v), ilp.again.get(program.maker(v)) if program.repeatable(v) else None
    return pulp.lpSum(way for way in ways if way is not None)


def _peak(ilp: CheckpointILP, around: MemoryTrace, unit: float) -> None:
    """(3) Bytes at the highest moments, in units of the budget (or of the trace's peak)."""
    rows = [*_forward_rows(ilp, around), *_backward_rows(ilp, around)]
    if around.program.between_bytes:
        rows.append(_between_row(ilp, around))
    least = CLOSE * min(around.peak, unit)
    rows = sorted((row for row in rows if row[0] >= least), key=lambda row: -row[0])[:MOST_ROWS]
    for number, (_, written) in enumerate(rows):
        constant, terms = written()
        held = pulp.LpAffineExpression({x: nbytes / unit for x, nbytes in terms.items()}, constant / unit)
        ilp.model.addConstraint(held <= ilp.peak, f"peak_{number}")


Held = tuple[int, dict[pulp.LpVariable, int]]
"""Bytes in memory whatever the choice; bytes by variable."""
Row = tuple[int, Callable[[], Held]]
"""Bytes of the trace; a function that builds the row, which is expensive, and done for few of them."""


def _forward_rows(ilp: CheckpointILP, around: MemoryTrace) -> Iterator[Row]:
    """Saved storages stay from their producer on; the others live as in the trace."""
    program, phase = around.program, around.forward
    made = {s: position for position, number in enumerate(phase.order) for s in program.runs[number].makes}
    lives = {life.storage: life for life in phase.lives}
    end = len(phase.order)
    read: dict[int, int] = {}
    for position, number in enumerate(phase.order):
        read.update(dict.fromkeys(program.runs[number].reads, position))
    others = {s: (phase.position(_section(program, s)[0]), (program.copies[s] - 1) * program.storages[s].nbytes)
              for s in {*ilp.keep, *program.returned} if program.copies[s] > 1}

    def held(position: int) -> Held:
        constant, terms = phase.workspace_bytes[position], {}
        constant += _add_others(ilp, around, program.microbatches.others(False, around.saved_bytes), terms)
        for s, (start, nbytes) in others.items():  # of layers that are over
            if position >= start and s in ilp.keep:
                terms[ilp.keep[s]] = terms.get(ilp.keep[s], 0) + nbytes
            elif position >= start:
                constant += nbytes
        for s, life in lives.items():
            if s in ilp.keep:
                continue
            if life.first <= position <= life.last:
                constant += program.storages[s].nbytes
        for s, x in ilp.keep.items():
            first, nbytes = made.get(s, end), program.storages[s].nbytes
            if first > position:
                continue
            if position <= read.get(s, -1) and s in lives:  # it is in memory at this moment, saved or not
                constant += nbytes
            else:
                terms[x] = terms.get(x, 0) + nbytes
                if s in ilp.away and position <= max(first, read.get(s, -1)):
                    terms[ilp.away[s]] = nbytes
        return constant, terms

    yield from ((phase.nbytes[position], partial(held, position)) for position in _tops(phase))


def _backward_rows(ilp: CheckpointILP, around: MemoryTrace) -> Iterator[Row]:
    """Saved storages stay until their last read in the trace; recomputed or offloaded ones, from their first read there on."""
    program, phase = around.program, around.backward
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, number in enumerate(phase.order):
        for s in program.runs[number if number >= 0 else -1 - number].reads:
            first.setdefault(s, position)
            last[s] = position
    made = {s: position for position, number in enumerate(phase.order) if number < 0 for s in program.runs[-1 - number].makes}
    lives = {life.storage: life for life in phase.lives}
    stretches = {stretch.stand_in: stretch for stretch in phase.stretches}
    others = {s: (program.copies[s] - 1) * program.storages[s].nbytes for s in ilp.keep if s not in program.returned}
    returned = sum((program.copies[s] - 1) * program.storages[s].nbytes for s in program.returned)

    def held(position: int, last_layer: FoldedLayer | None) -> Held:
        over = {each for each, stretch in stretches.items() if position >= stretch.end or each == last_layer}
        constant, terms = phase.workspace_bytes[position] + returned + sum(stretches[each].made for each in over), {}
        later = dict[pulp.LpVariable, int]()
        constant += _add_others(ilp, around, program.microbatches.others(True, around.saved_bytes), later)
        for s, life in lives.items():
            if s not in ilp.keep and life.first <= position <= life.last:
                constant += program.storages[s].nbytes
        for s, x in ilp.keep.items():
            nbytes = program.storages[s].nbytes
            life = lives.get(s)
            end = max(last.get(s, -1), life.last if life is not None else -1)
            if end >= 0 and others.get(s) and program.stand_in_of[program.maker(s)] not in over:
                terms[x] = others[s]  # of layers still to come
            if position <= end:
                terms[x] = terms.get(x, 0) + nbytes
                if min(first.get(s, end), made.get(s, end)) > position:
                    continue
                if s in ilp.away:
                    terms[ilp.away[s]] = nbytes
                inlined = s in made and life is None  # recomputed inside its readers
                if not inlined and program.repeatable(s):
                    again = ilp.again[program.maker(s)]
                    terms[again] = terms.get(again, 0) + nbytes
        for x, nbytes in later.items():
            terms[x] = terms.get(x, 0) + nbytes
        return constant, terms

    yield from ((phase.nbytes[position], partial(held, position, last_layer)) for position, last_layer in _moments(phase))


def _moments(phase: PhaseTimeline) -> Iterator[tuple[int, FoldedLayer | None]]:
    """Moments that may be the peak; in a folded layer, as the first and, with it, as the last of its layers."""
    for position in _tops(phase):
        yield position, None
        for stretch in phase.stretches:
            if stretch.start <= position < stretch.end:
                yield position, stretch.stand_in


def _add_others(ilp: CheckpointILP, around: MemoryTrace, others: OtherMicrobatches,
                terms: dict[pulp.LpVariable, int]) -> int:
    """Memory of other microbatches: adds their saved values to the terms, and returns the bytes of the rest."""
    if others.in_flight:
        for v, x in ilp.keep.items():
            terms[x] = terms.get(x, 0) + others.in_flight * around.program.bytes_of([v])
    return others.saved_bytes + others.gradient_bytes


def _between_row(ilp: CheckpointILP, around: MemoryTrace) -> Row:
    """Saved storages are all in memory after forward."""
    program = around.program
    constant = program.bytes_of(program.returned) + program.between_bytes
    number = program.microbatches.in_flight
    return around.between, lambda: (
        constant, {x: nbytes for s, x in ilp.keep.items()
                   if (nbytes := (number - (s in program.returned)) * program.bytes_of([s]))})


def _section(program: StorageProgram, storage: int) -> tuple[int, int]:
    """For a storage of a folded layer: the ops of the phase that writes it."""
    maker = program.maker(storage)
    stand_in = program.stand_in_of[maker]
    assert stand_in is not None, "its maker has layers"
    return next(section for section in (stand_in.forward, stand_in.backward) if section[0] <= maker < section[1])


def _tops(phase: PhaseTimeline) -> Iterator[int]:
    """Local maxima: other moments cannot be the peak."""
    nbytes = phase.nbytes
    for k, here in enumerate(nbytes):
        before, after = nbytes[k - 1] if k else -1, nbytes[k + 1] if k + 1 < len(nbytes) else -1
        if here >= before and here >= after and not (k and here == before):
            yield k


def _most(us: dict[pulp.LpVariable, float]) -> float:
    return max(us.values(), default=0.0) or 1.0
