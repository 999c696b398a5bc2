"""Four layers of which two stand for many -> bytes and time of the storage program of all layers."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from passes.checkpointing.checkpoint_search import choose_saved
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.checkpointing.layers.layer_folding import fold_layers, split_layers
from passes.checkpointing.layers.layer_unfolding import counts_alike, unfold_layers
from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from passes.simulation.memory.storage_program import StorageProgram
from tests.passes.checkpointing.layered import layered

MASK = 6
BLOCKS = ("l.0", "l.1", "l.2", "l.3")


def folded(seed: int, layers: int, inlining: bool = True) -> StorageProgram:
    return fold_layers(layered(seed, 4, inlining), [BLOCKS], layers)


def in_all_layers(name: str, program: StorageProgram, layers: int) -> list[str]:
    """Names in the program of all layers that this name of the folded program stands for."""
    layer, _, rest = name.partition(".")
    if not rest:
        return [name]
    ones = program.stand_ins[0].layers
    stands_for = {"0": [0], "1": range(1, 1 + ones), "2": range(1 + ones, layers - 1), "3": [layers - 1]}
    return [f"{k}.{rest}" for k in stands_for[layer]]


def of_all_layers(walked: MemoryTrace, seed: int, layers: int, inlining: bool = True) -> MemoryTrace:
    """The same kept along the program of all layers."""
    program, whole = walked.program, layered(seed, layers, inlining)
    numbers = {storage.name: s for s, storage in enumerate(whole.storages)}
    kept, away = ({numbers[each] for s in which for each in in_all_layers(program.storages[s].name, program, layers)}
                  for which in (walked.saved, walked.offloaded))
    return simulate_memory(whole, kept, away)


def sources(program: StorageProgram, layers: int) -> dict[str, str]:
    """Name of each run in the program of all layers -> that of the folded program's run that stands for it."""
    return {each: run.name for run in program.runs for each in in_all_layers(run.name, program, layers)}


def most(phase, names) -> dict[tuple[str, bool], int]:
    """Bytes by run of the folded program, and whether it runs once more: in that of its layers where most is held."""
    found: dict[tuple[str, bool], int] = {}
    for number, nbytes in zip(phase.order, phase.nbytes, strict=True):
        name = phase.program.runs[max(number, -1 - number)].name
        key = names.get(name, name), number < 0
        found[key] = max(nbytes, found.get(key, 0))
    return found


def some_kept(program: StorageProgram, draw: random.Random) -> frozenset[int]:
    return frozenset(s for s in program.candidates if draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("layers", [6, 9])
def test_each_run_holds_what_it_does_in_all_layers(seed, layers):
    program = folded(seed, layers, inlining=False)
    walked = simulate_memory(program, some_kept(program, random.Random(seed)))
    whole = of_all_layers(walked, seed, layers, inlining=False)
    for ours, theirs in (walked.forward, whole.forward), (walked.backward, whole.backward):
        counted, expected = most(ours, {}), most(theirs, sources(program, layers))
        if program.for_all_layers:  # for the first of these layers it may not be there yet, and for the last not any more
            assert {key: max(min(nbytes, expected[key]), nbytes - MASK) for key, nbytes in counted.items()} == expected
        else:
            assert counted == expected
    assert (walked.between, walked.after) == (whole.between, whole.after)
    assert walked.us == pytest.approx(whole.us) and counts_alike(walked)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_counted_alike_for_a_few_layers_is_for_all(seed):
    """Light calls, which a compiler may put into the kernels of the layer after, need not be alike in each layer."""
    program = folded(seed, 12)
    walked = simulate_memory(program, some_kept(program, random.Random(seed)))
    whole = of_all_layers(walked, seed, 12)
    assert counts_alike(walked)
    assert whole.peak <= walked.peak <= 1.05 * whole.peak and walked.us == pytest.approx(whole.us)


@pytest.mark.parametrize("seed", range(20))
def test_unfolded_it_is_the_program_of_all_layers(seed):
    program = folded(seed, 7)
    unfolded, whole = unfold_layers(program).program, layered(seed, 7)
    assert [(r.name.split(".")[-1], r.backward, r.us) for r in unfolded.runs] == [
        (r.name.split(".")[-1], r.backward, r.us) for r in whole.runs]
    theirs = dict(zip((s for r in unfolded.runs for s in r.makes), (s for r in whole.runs for s in r.makes), strict=True))
    for ours, other in zip(unfolded.runs, whole.runs, strict=True):
        reads = [theirs[s] for s in ours.reads if s in theirs]
        expected = [s for s in other.reads if whole.storages[s].maker is not None]
        assert reads[:len(expected)] == expected
        assert all(whole.storages[s].name.endswith(".x") for s in reads[len(expected):]), "held for the next layer"
    assert {theirs[s] for s in unfolded.gradients} == whole.gradients
    assert {theirs[s] for s in unfolded.returned} == whole.returned


@pytest.mark.parametrize("seed", range(16))
def test_a_budget_is_kept_by_all_layers_too(seed):
    program = folded(seed, 20)
    least, all_kept = simulate_memory(program, ()), simulate_memory(program, program.candidates)
    budget = (least.peak + all_kept.peak) // 2
    answer = choose_saved(program, max(budget, least.peak))
    if counts_alike(answer.walk):
        whole = of_all_layers(answer.walk, seed, 20)
        assert whole.peak <= max(budget, least.peak) and whole.us == pytest.approx(answer.walk.us)


def test_as_many_layers_as_fit_keep_more():
    """Of 18 layers between the first and the last, each may keep 20 bytes more, or take 5 us once more."""
    program = folded(0, 20, inlining=False)
    kinds = [frozenset(s for s in program.candidates if program.storages[s].name.startswith(f"{k}.f")) for k in (1, 2)]
    low = simulate_memory(program, frozenset(s for s in program.candidates if not program.storages[s].name.startswith("2.f")))
    assert low.program.stand_ins[0].layers == 9 and kinds[0] & program.wanted <= low.saved
    for more in range(0, 8):
        each = (simulate_memory(program, low.saved | kinds[1]).between - low.between) // 9
        shared = split_layers(low, low.peak + more * each)
        assert shared.program.stand_ins[0].layers >= 9 and shared.peak <= low.peak + more * each
        assert shared.us <= low.us


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_gathered_while_the_layer_before_computes_is_part_of_that(seed, at_once):
    program = fold_layers(layered(seed, 4, False, ahead=True, at_once=at_once), [BLOCKS], 8)
    walked = simulate_memory(program, some_kept(program, random.Random(seed)) - program.never_saved)
    whole = layered(seed, 8, False, ahead=True, at_once=at_once)
    first = program.stand_ins[0]
    assert all(program.runs[begin].name != "1.whole" for begin, _ in (first.forward, first.backward))
    numbers = {storage.name: s for s, storage in enumerate(whole.storages)}
    kept = {numbers[each] for s in walked.saved for each in in_all_layers(program.storages[s].name, program, 8)}
    assert counts_alike(walked) and walked.peak == simulate_memory(whole, kept).peak


def test_depth_is_no_work():
    """The folded program is as long for a thousand layers as for four."""
    assert len(folded(1, 1000).runs) == len(layered(1, 4).runs)


def handed_out_by_one() -> StorageProgram:
    program = layered(2, 4)
    return replace(program, returned=program.returned | {
        s for s, storage in enumerate(program.storages) if storage.name == "1.f0"})


def crossing_twice() -> StorageProgram:
    """Layer k reads what layer k - 2 makes, too."""
    program = layered(2, 4)
    names = {storage.name: s for s, storage in enumerate(program.storages)}
    runs = tuple(replace(run, reads=(*run.reads, names[f"{int(run.name[0]) - 2}.f0"])) if run.name in ("2.x", "3.x") else run
                 for run in program.runs)
    return replace(program, runs=runs)


@pytest.mark.parametrize("program", [
    crossing_twice(), handed_out_by_one(),
], ids=["what crosses two layers", "a result of one layer alone"])
def test_what_no_layer_can_stand_for_is_refused(program):
    with pytest.raises(LayersDiffer):
        fold_layers(program, [BLOCKS], 8)


def test_without_the_blocks_there_is_nothing_to_fold():
    with pytest.raises(LayersDiffer):
        fold_layers(layered(0, 4), [("m.0", "m.1", "m.2", "m.3")], 8)


def test_what_a_layer_hands_on_is_kept():
    program = folded(0, 8)
    handed_on = {s for s, storage in enumerate(program.storages) if storage.name in ("0.x", "1.x", "2.x")}
    assert all(program.storages[s].pinned == "keep" for s in handed_on)
    assert handed_on & program.wanted <= simulate_memory(program, ()).saved
