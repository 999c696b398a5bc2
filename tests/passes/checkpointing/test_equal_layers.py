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
    for layers in equal_layers(trace.program):
        saved = [tuple(s in trace.saved for s in layer) for layer in layers]
        found.append(1 + sum(a != b for a, b in zip(saved, saved[1:])))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_layers_save_the_same_values_in_two_variants_within_the_budget(seed):
    program = layered(seed, LAYERS)
    assert sum(map(len, equal_layers(program))) >= LAYERS - 2
    least, most = (simulate_memory(program, frozenset(kept)) for kept in (program.bound_to_keep, program.wanted))
    budget = (least.peak + most.peak) // 2
    alike = choose_saved(program, budget, alike=True).walk
    assert alike.peak <= budget and simulate_memory(program, alike.saved, alike.offloaded).peak == alike.peak
    assert max(runs_of_variants(alike)) <= 2


def test_no_mixture_of_two_variants_that_fits_is_faster():
    """Against all mixtures of what two of the layers save, first and last."""
    program = layered(4, LAYERS)
    (layers,) = equal_layers(program)
    least, most = (simulate_memory(program, saved).peak for saved in (program.bound_to_keep, program.wanted))
    free = choose_saved(program, (least + most) // 2)
    budget = free.walk.peak
    alike = decide_alike(free.walk, budget, lambda kept, away: simulate_memory(program, kept, away))
    own = {s for layer in layers for s in layer}
    saved = {frozenset(k for k, s in enumerate(layer) if s in free.walk.saved) for layer in layers}
    for one in saved:
        for other in saved:
            for number in range(len(layers) + 1):
                kept = {layer[k] for n, layer in enumerate(layers) for k in (one if n < number else other)}
                tried = simulate_memory(program, frozenset((free.walk.saved - own) | (kept & {*program.candidates})))
                assert tried.peak > budget or tried.us >= alike.us


@pytest.mark.parametrize("seed", [20, 23, 43])
def test_a_budget_that_equal_layers_meet_is_not_refused(seed):
    """The least that layers hold which all save the same, by trying out every choice."""
    program = layered(seed, 14)
    (layers,) = equal_layers(program)
    own = {s for layer in layers for s in layer}
    others = frozenset(s for s in program.candidates if s not in own and not program.runs[program.maker(s)].inlined)
    places = [frozenset(place) & {*program.candidates} for place in zip(*layers)]
    tried = [simulate_memory(program, others.union(*some) - program.never_saved)
             for count in range(len(places) + 1) for some in itertools.combinations(places, count)]
    budget = min(each.peak for each in tried)
    for suggested in ([], [frozenset(program.wanted) & {*program.candidates}]):
        assert choose_saved(program, budget, suggested=suggested).walk.peak <= budget
