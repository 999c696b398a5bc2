"""Fold the storage program of many equal layers: the two in the middle stand for all but the first and the last.

Two, so that some layers may save values that others recompute: a budget between the peaks of all-save and all-recompute
is used up. Layers of one variant are consecutive. Values that a layer passes to the next are saved, so that no layer is
recomputed for another one; those that depend on parameters alone, such as a prefetched weight, are never saved.
"""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.checkpointing.layers.layer_boundary import LayerBoundary, LayersDiffer, boundary_between
from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from passes.simulation.memory.storage_program import FoldedLayer, ProgramOp, StorageProgram


def fold_layers(program: StorageProgram, lists: Sequence[Sequence[str]], layers: int) -> StorageProgram:
    """lists: for each list of equal layers, its blocks in the program: the first layer, two in the middle, the last. layers:
    length of each list in the model. Raises LayersDiffer if these are not equal, or pass on values that folded layers
    cannot."""
    stand_ins = [each for blocks in lists for each in _stand_ins(program, blocks, middle_layers(layers))]
    taken = [run for each in stand_ins for run in each.runs]
    if len(set(taken)) < len(taken):
        raise LayersDiffer("lists of layers run at the same time")
    early = tuple((run, place) for number, blocks in enumerate(lists) for run, place in _early(program, blocks, 2 * number))
    folded = replace(program, stand_ins=tuple(stand_ins), early=early)
    for number in range(len(lists)):
        folded = _handing_on(folded, boundary_between(folded, *stand_ins[2 * number: 2 * number + 2]))
    return folded


def middle_layers(layers: int) -> tuple[int, int]:
    """How many layers of a list each of the two in the middle stands for."""
    middle = layers - 2
    return middle - middle // 2, middle // 2


def _stand_ins(program: StorageProgram, blocks: Sequence[str], layers: tuple[int, int]) -> tuple[FoldedLayer, FoldedLayer]:
    """A layer's part of a phase extends from its first op there to the first op of the next layer."""
    turn = next((k for k, run in enumerate(program.runs) if run.backward), len(program.runs))
    first, one, other, last = blocks
    ahead = {block: _begin(program, block, 0, turn) for block in (one, other, last)}
    back = {block: _begin(program, block, turn, len(program.runs)) for block in blocks}
    if not ahead[one] < ahead[other] < ahead[last] or not back[last] < back[other] < back[one] < back[first]:
        raise LayersDiffer("layers do not run one after another")
    return (FoldedLayer(one, (ahead[one], ahead[other]), (back[one], back[first]), layers[0]),
            FoldedLayer(other, (ahead[other], ahead[last]), (back[other], back[one]), layers[1]))


def _begin(program: StorageProgram, block: str, start: int, stop: int) -> int:
    """Position of a layer's first op in a phase. Ops on parameters alone may come earlier, such as the gather of a weight
    during the previous layer: they belong to that layer. Gathers right before the first op are those of the next layer, where
    there is one, and belong to this one."""
    given = {s for s, storage in enumerate(program.storages) if storage.input_phase == "forward"}
    moved = {*given}  # and what casts and gathers make of single inputs
    for k in range(start, stop):
        run = program.runs[k]
        if run.block == block:
            if not _reads_only(run, given):
                while k > start and (program.runs[k - 1].block == block or _gathers(program, program.runs[k - 1], moved)):
                    k -= 1
                return k
            given.update(run.makes)
        if _gathers(program, run, moved):
            moved.update(run.makes)
    raise LayersDiffer(f"{block} computes nothing in a phase")


def _reads_only(run: ProgramOp, storages: set[int]) -> bool:
    return run.repeatable and storages.issuperset(run.reads)


def _gathers(program: StorageProgram, run: ProgramOp, moved: set[int]) -> bool:
    """True for a gather of inputs, or a cast for one."""
    return _reads_only(run, moved) and (len(run.reads) == 1 or any(program.storages[s].gathered for s in run.makes))


def _early(program: StorageProgram, blocks: Sequence[str], place: int) -> Iterator[tuple[int, int | None]]:
    """Forward ops that run before their layer begins, and the index of that layer among the folded ones."""
    _, one, other, last = blocks
    for block, of in ((one, place), (other, place + 1), (last, None)):
        begin = _begin(program, block, 0, len(program.runs))
        yield from ((k, of) for k in range(begin) if program.runs[k].block == block)


def _handing_on(program: StorageProgram, seam: LayerBoundary) -> StorageProgram:
    """Values that a layer passes to the next are saved at least until the next one's backward begins, or never."""
    later = [s for s in seam.leaving if program.is_forward(s) and not _of_given(program, seam.other, s)]
    if later:
        raise LayersDiffer(f"a layer reads {program.storages[later[0]].name} of the next one")
    said: dict[int, str] = {}
    read_by: dict[int, list[int]] = {}
    for s, before in seam.entering.items():
        handed_on = before, s, seam.twins[s]  # to the first folded layer, to the second, and to the last
        if not all(map(program.is_forward, handed_on)) or not set(handed_on).intersection(program.candidates):
            continue
        never = _of_given(program, seam.one, s)
        if any(program.storages[each].pinned == ("keep" if never else "again") for each in handed_on):
            raise LayersDiffer(f"{program.storages[s].name}, which layers pass on, is pinned")
        said.update(dict.fromkeys(handed_on, "again" if never else "keep"))
        if not never:
            begin, end = seam.one.backward[0], seam.other.backward[0]
            readers = (next(k for k in range(begin, len(program.runs)) if _is_kernel(program.runs[k])),
                       next(k for k in range(end, begin) if _is_kernel(program.runs[k])),
                       next(k for k in range(end - 1, -1, -1) if _is_kernel(program.runs[k])))
            for each, reader in zip(handed_on, readers, strict=True):
                read_by.setdefault(reader, []).append(each)
    storages = tuple(replace(storage, pinned=said[s], offload_us=math.inf) if s in said else storage
                     for s, storage in enumerate(program.storages))
    runs = tuple(replace(run, reads=tuple(dict.fromkeys((*run.reads, *read_by.get(k, ()))))) for k,
                 run in enumerate(program.runs))
    return replace(program, storages=storages, runs=runs)


def _of_given(program: StorageProgram, layer: FoldedLayer, storage: int) -> bool:
    """True if a layer computes the storage from parameters, or other inputs, alone."""
    found = {s for s, each in enumerate(program.storages) if each.input_phase == "forward"}
    for run in (program.runs[k] for k in layer.runs):
        if _reads_only(run, found):
            found.update(run.makes)
    return storage in found


def _is_kernel(run: ProgramOp) -> bool:
    """True for a backward op that is not inlined into its readers."""
    return run.backward and not run.inlined and bool(run.makes)


def split_layers(walked: MemoryTrace, budget_bytes: float) -> MemoryTrace:
    """The same decision with as many layers as fit of the faster variant. walked: a trace that fits; it is
    returned itself if both variants take equal time, or no more fit."""
    ones, others = (walked.program.stand_ins[k].layers for k in (0, 1))
    walks = {ones: walked}

    def look(number: int) -> MemoryTrace:
        if number not in walks:
            program = replace(walked.program, stand_ins=tuple(
                replace(each, layers=(ones + others - number) if k % 2 else number)
                for k, each in enumerate(walked.program.stand_ins)))
            walks[number] = simulate_memory(program, walked.saved, walked.offloaded)
        return walks[number]

    if others == 1 or look(ones + 1).us == walked.us:
        return walked
    numbers = range(ones, ones + others) if look(ones + 1).us < walked.us else range(ones, 0, -1)
    too_many = bisect_left(numbers, True, key=lambda number: look(number).peak > budget_bytes)  # peaks grow with the number
    return look(numbers[too_many - 1])
