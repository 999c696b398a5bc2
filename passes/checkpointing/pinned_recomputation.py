"""Pin for each block whether its activations are saved or recomputed, as Megatron-LM's recomputation options do.

A pin is written into the storage program as the script's own activation checkpointing is (`Storage.pinned`), so everything that
decides about saved activations obeys it. Calls outside of blocks, such as the head and the loss, are pinned by "none" alone.
In a graph without blocks, such as a layer that is compiled by itself, all calls are one block.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

from passes.simulation.memory.storage_program import ProgramOp, StorageProgram

Recompute = Literal["auto", "none", "selective", "full"]
"""auto: decided by cost; none: everything that backward reads is saved. selective: the inner values of attention are recomputed
(scores, softmax, dropout), all else is saved: Korthikanti et al. 2022 (arXiv 2205.05198), section 5. full: a block saves
nothing but its inputs: Chen et al. 2016 (arXiv 1604.06174)."""
Pins = tuple[tuple[str, Recompute], ...]
"""Patterns of block paths, such as "layers.*", with their values; of several that match, the last one counts."""


def pin_recomputation(program: StorageProgram, pins: Pins, of_stage: bool = False, gathers_again: bool = False,
                      ) -> StorageProgram:
    """The program with its storages pinned. of_stage: it is a stage of a graph with blocks. gathers_again: backward gathers all
    of its parameters; else it saves those of blocks that save more than their inputs where that is cheaper. The script's own
    checkpoints stay as they are. Results that cannot be recomputed, such as random numbers, are saved in any case."""
    if not pins and not gathers_again:
        return program
    blocks = {run.block for run in program.runs if not run.backward}
    mode = partial(_mode, pins=pins, alone=not (of_stage or any(blocks)))
    saved, seeded = set[int](), _seeded(program)
    for block in blocks:
        saved |= _saved(program, block, mode(block), seeded)
    storages = list(program.storages)
    for s in program.candidates:
        run = program.runs[program.maker(s)]
        if run.of_backward:  # recomputed with the values that it reads, in whatever block these are
            again = storages[s].gathered and (gathers_again or mode(run.block) == "full")
            if again or any(storages[each].pinned == "again" for each in run.reads):
                storages[s] = replace(storages[s], pinned="again")
        elif (how := mode(run.block)) != "auto" and not storages[s].pinned:
            storages[s] = replace(storages[s], pinned="keep" if how == "none" or s in saved else "again")
    return replace(program, storages=tuple(storages))


def unmatched(blocks: Iterable[str], pins: Pins) -> list[str]:
    """Patterns that match none of these blocks."""
    known = {block for block in blocks if block}
    return [pattern for pattern, _ in pins if pattern != "*" and not any(fnmatchcase(block, pattern) for block in known)]


def _mode(block: str, pins: Pins, alone: bool) -> Recompute:
    """alone: "" is the only block."""
    found: Recompute = "auto"
    for pattern, value in pins:
        if (block and fnmatchcase(block, pattern)) or (not block and pattern == "*" and (alone or value == "none")):
            found = value
    return found


def _seeded(program: StorageProgram) -> set[int]:
    """Storages of random numbers from a seed, and of what is computed from them alone, such as masks of dropout."""
    found: set[int] = set()
    for run in program.runs:
        if run.seeded or run.reads and found.issuperset(run.reads):
            found.update(run.makes)
    return found


def _saved(program: StorageProgram, block: str, mode: Recompute, seeded: set[int]) -> set[int]:
    """Storages made in a block that are saved. seeded: storages for which seeds are all that has to be saved."""
    runs = [run for run in program.runs if run.block == block and not run.backward]
    made = {s for run in runs for s in run.makes}
    if mode == "selective":
        return made - _inside_attention(runs, seeded)
    if mode == "full":  # its results, which are the inputs of other blocks
        return {s for s in made if s in program.returned or any(
            program.runs[k].block != block and not (program.runs[k].backward or program.runs[k].of_backward)
            for k in program.readers[s])}
    return set()


def _inside_attention(runs: Sequence[ProgramOp], seeded: set[int]) -> set[int]:
    """Storages between the batched products of activations in a block: results of one that another is computed from, and
    masks of dropout that these are computed with."""
    after: set[int] = set()
    for run in runs:
        if run.multiplies_activations or after.intersection(run.reads):
            after.update(run.makes)
    before: set[int] = set()
    for run in reversed(runs):
        if run.multiplies_activations or before.intersection(run.makes):
            before.update(run.reads)
    inside = after & before
    for run in reversed(runs):
        if inside.intersection(run.makes):
            inside.update(seeded.intersection(run.reads))
    return inside
