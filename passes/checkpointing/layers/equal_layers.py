"""Let equal layers save the same values, so that regional compilation has few different blocks to compile.

A search decides value by value: of two equal layers, one may save a value and the other another one at the same cost. Here the
layers take over what some of them saved, in at most two variants: the first layers one, the others another.
"""
from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from passes.simulation.memory.memory_trace import MemoryTrace
from passes.simulation.memory.storage_program import ProgramOp, StorageProgram

LEAST_LAYERS = 3
MOST_VARIANTS = 6
"""Limit of variants of a layer, of which all pairs are tried."""

Layer = tuple[int, ...]
"""Storages that a layer's ops write and forward can write, in order; at equal places of equal layers are corresponding ones."""
Variant = tuple[frozenset[int], frozenset[int]]
"""Places of a layer that are saved, and those of them that are offloaded."""
Look = Callable[[frozenset[int], frozenset[int]], MemoryTrace]


def decide_alike(found: MemoryTrace, budget_bytes: float, look: Look) -> MemoryTrace:
    """The fastest trace within the budget in which equal layers save the same values in at most two variants; where none fits,
    `found` if that does, or else the one with the lowest peak. look: trace of a choice of saved storages, and of offloaded
    ones."""
    for layers in equal_layers(found.program):
        tried = list(_alike(found, layers, budget_bytes, look))
        fitting = [each for each in tried if each.peak <= budget_bytes]
        if fitting:
            found = min(fitting, key=lambda each: (each.us, each.peak))
        elif found.peak > budget_bytes:
            found = min([found, *tried], key=lambda each: each.peak)
    return found


def equal_layers(program: StorageProgram) -> list[list[Layer]]:
    """The layers of each list of equal ones, in order."""
    found: dict[Hashable, list[Layer]] = defaultdict(list)
    for runs in _runs_of_blocks(program).values():
        mine = [run for run in runs if not run.backward]
        layer = tuple(s for run in mine for s in run.makes)
        found[tuple(_does(program, run) for run in mine)].append(layer)
    return [layers for layers in found.values() if len(layers) >= LEAST_LAYERS and layers[0]]


def _runs_of_blocks(program: StorageProgram) -> dict[str, list[ProgramOp]]:
    """The ops of each block; one without a block belongs to the same as the op before it."""
    found: dict[str, list[ProgramOp]] = defaultdict(list)
    block = ""
    for run in program.runs:
        block = run.block or block
        found[block].append(run)
    found.pop("", None)
    return found


def _does(program: StorageProgram, run: ProgramOp) -> Hashable:
    return (run.us, run.repeatable, run.inlined, run.fusing, run.of_backward, len(run.reads),
            tuple(program.storages[s].nbytes for s in run.makes))


def _alike(found: MemoryTrace, layers: Sequence[Layer], budget_bytes: float, look: Look) -> Iterator[MemoryTrace]:
    """For each two variants, the trace with as many layers of the larger one as fit, first or last."""
    program, own = found.program, {s for layer in layers for s in layer}
    sizes = [program.storages[s].nbytes for s in layers[0]]

    def trace(variants: Sequence[Variant]) -> MemoryTrace:
        kept, away = (frozenset(layer[k] for layer, each in zip(layers, variants, strict=True) for k in each[which])
                      for which in (0, 1))
        return look((found.saved - own) | kept.intersection(program.candidates), (found.offloaded - own) | away)

    variants = sorted(_variants(found, layers), key=lambda each: sum(sizes[k] for k in each[0] - each[1]))
    for (fewer, more), first in itertools.product(itertools.combinations(variants, 2), (False, True)):
        def mixed(number: int, fewer: Variant = fewer, more: Variant = more, first: bool = first) -> MemoryTrace:
            ones, others = [more] * number, [fewer] * (len(layers) - number)
            return trace([*ones, *others] if first else [*others, *ones])

        too_many = bisect_left(range(len(layers) + 1), True, key=lambda number: mixed(number).peak > budget_bytes)
        yield mixed(max(too_many - 1, 0))


def _variants(found: MemoryTrace, layers: Sequence[Layer]) -> list[Variant]:
    """Variants of a layer to try: those in `found`, the most frequent first; the smallest, which saves only what other layers
    read or nothing can recompute; and the largest, which saves all that backward reads."""
    program = found.program
    own = [frozenset(layer) for layer in layers]
    bound, wanted, handed_on = set[int](), set[int](), set[int]()
    for layer, inside in zip(layers, own, strict=True):
        runs = {program.storages[s].maker for s in inside}
        for k, s in enumerate(layer):
            readers = [each for each in program.readers[s] if not program.runs[each].backward and each not in runs]
            bound.update([k] if s in program.bound_to_keep else [])
            wanted.update([k] if s in program.wanted and not program.runs[program.maker(s)].inlined else [])
            handed_on.update([k] if readers and s in program.candidates else [])
    counted = Counter((frozenset(k for k, s in enumerate(layer) if s in found.saved),
                       frozenset(k for k, s in enumerate(layer) if s in found.offloaded)) for layer in layers)
    extremes = [(frozenset(bound | more), frozenset[int]()) for more in (handed_on, wanted)]
    seen = [(kept | bound, away) for (kept, away), _ in counted.most_common(MOST_VARIANTS - len(extremes))]
    return list(dict.fromkeys([*seen, *extremes]))
