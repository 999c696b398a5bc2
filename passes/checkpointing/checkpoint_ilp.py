"""Activation checkpointing as an integer linear program, linearized around a memory trace.

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
    program = build_checkpoint_ilp(around, budget_bytes, offloading)
    allowance.spend("coefficient", sum(map(len, rows_of(program.model))))
    outcome = run(program.model, options, integer=True, allowance=allowance, start=False)
    return program.choice() if outcome.state in ("optimal", "feasible") else None


def build_checkpoint_ilp(around: MemoryTrace, budget_bytes: float | None, offloading: bool = True) -> CheckpointILP:
    tape = around.tape
    offloadable = tape.offloadable if offloading else frozenset[int]()
    model = pulp.LpProblem("keeping", pulp.LpMinimize)
    runs = sorted({tape.maker(v) for v in tape.candidates if tape.repeatable(v)})
    program = CheckpointILP(
        model,
        {v: model.add_variable(f"keep_{v}", 0, int(v not in tape.never_kept), pulp.LpInteger) for v in tape.candidates},
        {v: model.add_variable(f"away_{v}", cat=pulp.LpBinary) for v in tape.candidates if v in offloadable},
        {o: model.add_variable(f"again_{o}", 0, 1) for o in runs},
        model.add_variable("peak", 0),
    )
    us = {**{program.again[o]: tape.us_of(o) for o in runs},
          **{x: tape.save_us_of(v) for v, x in program.keep.items()},
          **{x: tape.offload_us_of(v) for v, x in program.away.items()}}
    if budget_bytes is None:
        unit = max(around.peak, 1)
        model.setObjective(pulp.LpAffineExpression({program.peak: 1e3, **{x: 1e-3 * c / _most(us) for x, c in us.items()}}))
    else:
        unit = max(budget_bytes, 1)
        model.setObjective(pulp.LpAffineExpression({x: 1e3 * c / _most(us) for x, c in us.items()}))
        program.peak.upBound = 1.0
    _read(program, tape)
    _need(program, tape)
    _peak(program, around, unit)
    return program


def _read(program: CheckpointILP, tape: StorageProgram) -> None:
    """(1) Storages that backward reads are saved, offloaded or recomputed."""
    for v in tape.wanted:
        program.model.addConstraint(_there(program, tape, v) >= 1, f"read_{v}")


def _need(program: CheckpointILP, tape: StorageProgram) -> None:
    """(2) Operands of recomputed ops are available."""
    for o, again in program.again.items():
        for v in tape.runs[o].reads:
            if v in program.keep:
                program.model.addConstraint(_there(program, tape, v) >= again, f"need_{o}_{v}")


def _there(program: CheckpointILP, tape: StorageProgram, v: int) -> pulp.LpAffineExpression:
    """Saved or, if possible, offloaded or recomputed."""
    ways = program.keep[v], program.away.get(v), program.again.get(tape.maker(v)) if tape.repeatable(v) else None
    return pulp.lpSum(way for way in ways if way is not None)


def _peak(program: CheckpointILP, around: MemoryTrace, unit: float) -> None:
    """(3) Bytes at the highest moments, in units of the budget (or of the trace's peak)."""
    rows = [*_forward_rows(program, around), *_backward_rows(program, around)]
    if around.tape.between_bytes:
        rows.append(_between_row(program, around))
    least = CLOSE * min(around.peak, unit)
    rows = sorted((row for row in rows if row[0] >= least), key=lambda row: -row[0])[:MOST_ROWS]
    for number, (_, written) in enumerate(rows):
        constant, terms = written()
        held = pulp.LpAffineExpression({x: nbytes / unit for x, nbytes in terms.items()}, constant / unit)
        program.model.addConstraint(held <= program.peak, f"peak_{number}")


Held = tuple[int, dict[pulp.LpVariable, int]]
"""Bytes in memory whatever the choice; bytes by variable."""
Row = tuple[int, Callable[[], Held]]
"""Bytes of the trace; a function that builds the row, which is expensive, and done for few of them."""


def _forward_rows(program: CheckpointILP, around: MemoryTrace) -> Iterator[Row]:
    """Saved storages stay from their producer on; the others live as in the trace."""
    tape, phase = around.tape, around.forward
    made = {s: position for position, number in enumerate(phase.order) for s in tape.runs[number].makes}
    lives = {life.storage: life for life in phase.lives}
    end = len(phase.order)
    read: dict[int, int] = {}
    for position, number in enumerate(phase.order):
        read.update(dict.fromkeys(tape.runs[number].reads, position))
    others = {s: (phase.position(_section(tape, s)[0]), (tape.copies[s] - 1) * tape.storages[s].nbytes)
              for s in {*program.keep, *tape.returned} if tape.copies[s] > 1}

    def held(position: int) -> Held:
        constant, terms = phase.workspace_bytes[position], {}
        constant += _add_others(program, around, tape.microbatches.others(False, around.kept_bytes), terms)
        for s, (start, nbytes) in others.items():  # of layers that are over
            if position >= start and s in program.keep:
                terms[program.keep[s]] = terms.get(program.keep[s], 0) + nbytes
            elif position >= start:
                constant += nbytes
        for s, life in lives.items():
            if s in program.keep:
                continue
            if life.first <= position <= life.last:
                constant += tape.storages[s].nbytes
        for s, x in program.keep.items():
            first, nbytes = made.get(s, end), tape.storages[s].nbytes
            if first > position:
                continue
            if position <= read.get(s, -1) and s in lives:  # it is in memory at this moment, saved or not
                constant += nbytes
            else:
                terms[x] = terms.get(x, 0) + nbytes
                if s in program.away and position <= max(first, read.get(s, -1)):
                    terms[program.away[s]] = nbytes
        return constant, terms

    yield from ((phase.nbytes[position], partial(held, position)) for position in _tops(phase))


def _backward_rows(program: CheckpointILP, around: MemoryTrace) -> Iterator[Row]:
    """Saved storages stay until their last read in the trace; recomputed or offloaded ones, from their first read there on."""
    tape, phase = around.tape, around.backward
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, number in enumerate(phase.order):
        for s in tape.runs[number if number >= 0 else -1 - number].reads:
            first.setdefault(s, position)
            last[s] = position
    made = {s: position for position, number in enumerate(phase.order) if number < 0 for s in tape.runs[-1 - number].makes}
    lives = {life.storage: life for life in phase.lives}
    stretches = {stretch.stand_in: stretch for stretch in phase.stretches}
    others = {s: (tape.copies[s] - 1) * tape.storages[s].nbytes for s in program.keep if s not in tape.returned}
    returned = sum((tape.copies[s] - 1) * tape.storages[s].nbytes for s in tape.returned)

    def held(position: int, last_layer: FoldedLayer | None) -> Held:
        over = {each for each, stretch in stretches.items() if position >= stretch.end or each == last_layer}
        constant, terms = phase.workspace_bytes[position] + returned + sum(stretches[each].made for each in over), {}
        later = dict[pulp.LpVariable, int]()
        constant += _add_others(program, around, tape.microbatches.others(True, around.kept_bytes), later)
        for s, life in lives.items():
            if s not in program.keep and life.first <= position <= life.last:
                constant += tape.storages[s].nbytes
        for s, x in program.keep.items():
            nbytes = tape.storages[s].nbytes
            life = lives.get(s)
            end = max(last.get(s, -1), life.last if life is not None else -1)
            if end >= 0 and others.get(s) and tape.stand_in_of[tape.maker(s)] not in over:
                terms[x] = others[s]  # of layers still to come
            if position <= end:
                terms[x] = terms.get(x, 0) + nbytes
                if min(first.get(s, end), made.get(s, end)) > position:
                    continue
                if s in program.away:
                    terms[program.away[s]] = nbytes
                inlined = s in made and life is None  # recomputed inside its readers
                if not inlined and tape.repeatable(s):
                    again = program.again[tape.maker(s)]
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


def _add_others(program: CheckpointILP, around: MemoryTrace, others: OtherMicrobatches,
                terms: dict[pulp.LpVariable, int]) -> int:
    """Memory of other microbatches: adds their saved values to the terms, and returns the bytes of the rest."""
    if others.in_flight:
        for v, x in program.keep.items():
            terms[x] = terms.get(x, 0) + others.in_flight * around.tape.bytes_of([v])
    return others.saved_bytes + others.gradient_bytes


def _between_row(program: CheckpointILP, around: MemoryTrace) -> Row:
    """Saved storages are all in memory after forward."""
    tape = around.tape
    constant = tape.bytes_of(tape.returned) + tape.between_bytes
    number = tape.microbatches.in_flight
    return around.between, lambda: (
        constant, {x: nbytes for s, x in program.keep.items()
                   if (nbytes := (number - (s in tape.returned)) * tape.bytes_of([s]))})


def _section(tape: StorageProgram, storage: int) -> tuple[int, int]:
    """For a storage of a folded layer: the ops of the phase that writes it."""
    maker = tape.maker(storage)
    stand_in = tape.stand_in_of[maker]
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
