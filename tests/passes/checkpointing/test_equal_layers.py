"""A decision about equal layers -> the same values are saved in each, in at most two variants, within the budget."""
from __future__ import annotations

import itertools

import pytest

from passes.checkpointing.checkpoint_search import choose_saved
from passes.checkpointing.layers.equal_layers import decide_alike, equal_layers
from passes.simulation.memory.memory_trace import MemoryTrace, simulate_memory
from tests.passes.checkpointing.layered import layered

LAYERS = 8


def runs_of_variants(trace: MemoryTrace) -> list[int]:
    """For each list of equal layers, the number of runs of layers that save the same."""
    found = []
    for layers in equal_layers(trace.tape):
        saved = [tuple(s in trace.kept for s in layer) for layer in layers]
        found.append(1 + sum(a != b for a, b in zip(saved, saved[1:])))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_layers_save_the_same_values_in_two_variants_within_the_budget(seed):
    tape = layered(seed, LAYERS)
    assert sum(map(len, equal_layers(tape))) >= LAYERS - 2
    least, most = (simulate_memory(tape, frozenset(kept)) for kept in (tape.bound_to_keep, tape.wanted))
    budget = (least.peak + most.peak) // 2
    alike = choose_saved(tape, budget, alike=True).walk
    assert alike.peak <= budget and simulate_memory(tape, alike.kept, alike.offloaded).peak == alike.peak
    assert max(runs_of_variants(alike)) <= 2


def test_no_mixture_of_two_variants_that_fits_is_faster():
    """Against all mixtures of what two of the layers save, first and last."""
    tape = layered(4, LAYERS)
    (layers,) = equal_layers(tape)
    free = choose_saved(tape, (simulate_memory(tape, tape.bound_to_keep).peak + simulate_memory(tape, tape.wanted).peak) // 2)
    budget = free.walk.peak
    alike = decide_alike(free.walk, budget, lambda kept, away: simulate_memory(tape, kept, away))
    own = {s for layer in layers for s in layer}
    saved = {frozenset(k for k, s in enumerate(layer) if s in free.walk.kept) for layer in layers}
    for one in saved:
        for other in saved:
            for number in range(len(layers) + 1):
                kept = {layer[k] for n, layer in enumerate(layers) for k in (one if n < number else other)}
                tried = simulate_memory(tape, frozenset((free.walk.kept - own) | (kept & {*tape.candidates})))
                assert tried.peak > budget or tried.us >= alike.us


@pytest.mark.parametrize("seed", [20, 23, 43])
def test_a_budget_that_equal_layers_meet_is_not_refused(seed):
    """The least that layers hold which all save the same, by trying out every choice."""
    tape = layered(seed, 14)
    (layers,) = equal_layers(tape)
    own = {s for layer in layers for s in layer}
    others = frozenset(s for s in tape.candidates if s not in own and not tape.runs[tape.maker(s)].inlined)
    places = [frozenset(place) & {*tape.candidates} for place in zip(*layers)]
    tried = [simulate_memory(tape, others.union(*some) - tape.never_kept)
             for count in range(len(places) + 1) for some in itertools.combinations(places, count)]
    budget = min(each.peak for each in tried)
    for suggested in ([], [frozenset(tape.wanted) & {*tape.candidates}]):
        assert choose_saved(tape, budget, suggested=suggested).walk.peak <= budget
