"""Bytes of a storage program, counted by hand and by a slower, independent count."""
from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import ProgramOp, Storage, StorageProgram
from tests.passes.checkpointing.storage_programs import chain, random_program


def names(program, order):
    return [program.runs[k].name if k >= 0 else "again " + program.runs[-1 - k].name for k in order]


def test_everything_kept_adds_up_until_backward_frees_it():
    program = chain([10, 20, 30])
    walked = simulate_memory(program, program.candidates)
    assert walked.forward.nbytes == (10, 30, 60)
    assert walked.backward.nbytes == (60 + 30, 30 + 30 + 20, 10 + 20 + 10)
    assert walked.recomputed == ()


def test_what_is_not_kept_is_made_again_just_before_its_reader():
    program = chain([10, 20, 30])
    walked = simulate_memory(program, {1})
    assert names(program, walked.backward.order) == ["again f1", "again f2", "b2", "b1", "b0"]
    assert walked.forward.nbytes == (10,), "forward returns nothing, and only runs for what is kept"
    assert walked.backward.nbytes[0] == 10 + 20
    assert walked.us == 2.0


def test_it_is_made_again_once_and_lives_until_it_is_last_read():
    program = chain([10, 20, 30])
    walked = simulate_memory(program, ())
    assert names(program, walked.backward.order)[:3] == ["again f0", "again f1", "again f2"]
    assert walked.backward.nbytes == (10, 30, 60, 90, 80, 40)


def test_what_backward_does_not_read_is_not_held_until_then():
    """b -> e -> f, and backward reads f alone."""
    runs = (ProgramOp("b", False, 1.0, (0,), (1,)), ProgramOp("e", False, 1.0, (1,), (2,)),
            ProgramOp("back", True, 1.0, (2,), (3,)))
    storages = (Storage("x", 0, None, "forward"), Storage("b", 100, 0), Storage("e", 10, 1), Storage("gradient", 1, 2))
    program = StorageProgram(runs, storages, frozenset(), frozenset({3}))
    both, offloaded, first = (simulate_memory(program, *each).without_unread for each in (({1, 2},), ({1, 2}, {1}), ({1},)))
    assert both.saved == {2} and offloaded.offloaded == frozenset() and first.saved == {1}
    assert both.backward.nbytes == (11,)


def pointwise(fusing: bool) -> StorageProgram:
    """x -> big -> small, of which `big` is computed by its reader where that fuses."""
    runs = (ProgramOp("big", False, 1.0, (0,), (1,), True, True, True),
            ProgramOp("small", False, 1.0, (1,), (2,), True, False, fusing))
    storages = (Storage("x", 7, None, "forward"), Storage("big", 100, 0), Storage("small", 10, 1))
    return StorageProgram(runs, storages, frozenset({2}), frozenset())


def test_what_readers_compute_takes_nothing():
    assert simulate_memory(pointwise(True), ()).peak == 10
    assert simulate_memory(pointwise(False), ()).peak == 110


def test_what_an_inlined_result_is_computed_from_lives_as_long_as_its_readers():
    runs = (ProgramOp("a", False, 1.0, (0,), (1,)), ProgramOp("cheap", False, 1.0, (1,), (2,), True, True, True),
            ProgramOp("other", False, 1.0, (0,), (3,)), ProgramOp("end", False, 1.0, (2, 3), (4,), True, False, True))
    storages = (Storage("x", 0, None, "forward"), Storage("a", 10, 0), Storage("cheap", 10, 1), Storage("other", 5, 2),
                Storage("end", 1, 3))
    walked = simulate_memory(StorageProgram(runs, storages, frozenset({4}), frozenset()), ())
    assert walked.forward.nbytes == (10, 10, 15, 16)


@pytest.mark.parametrize(("again", "after"), [(False, 10), (True, 20)])
def test_what_is_costly_to_compute_is_written_where_other_kernels_read_it_too(again, after):
    """x -> gate -> a, library(a) -> b, and b is computed from the gate, too, or not."""
    runs = (ProgramOp("gate", False, 1.0, (0,), (1,), True, True, True, costly=True),
            ProgramOp("half", False, 1.0, (1,), (2,), True, True, True),
            ProgramOp("a", False, 1.0, (1, 2), (3,), True, False, True), ProgramOp("library", False, 1.0, (3,), (4,)),
            ProgramOp("b", False, 1.0, (4, 2) if again else (4,), (5,), True, False, True))
    storages = (Storage("x", 0, None, "forward"), Storage("gate", 10, 0), Storage("half", 10, 1), Storage("a", 10, 2),
                Storage("library", 1, 3), Storage("b", 1, 4))
    assert simulate_memory(StorageProgram(runs, storages, frozenset({5}), frozenset()), ()).forward.nbytes[2] == after


def test_a_light_kernel_writes_over_what_nobody_reads_any_more():
    storages = (Storage("x", 0, None, "forward"), Storage("a", 10, 0), Storage("b", 10, 1))
    for fusing, peak in ((True, 10), (False, 20)):
        runs = (ProgramOp("a", False, 1.0, (0,), (1,)), ProgramOp("b", False, 1.0, (1,), (2,), True, False, fusing))
        assert simulate_memory(StorageProgram(runs, storages, frozenset({2}), frozenset()), ()).peak == peak


@pytest.mark.parametrize(("lingers", "nbytes"), [(False, (101, 101, 2, 52, 2)), (True, (101, 101, 102, 152, 52))])
def test_the_workspace_of_a_collective_is_there_until_it_is_waited_for_or_another_one_is_over(lingers, nbytes):
    storages = tuple(Storage(f"s{k}", 1, None if not k else 0 if k == 1 else k, "" if k else "forward") for k in range(5))
    runs = (ProgramOp("gather", False, 1.0, (0,), (1,), workspace_bytes=100, lingers=lingers),
            ProgramOp("wait", False, 0.0, (1,), (), waits_for=0),
            ProgramOp("light", False, 1.0, (1,), (2,)), ProgramOp("gather_2", False, 1.0, (2,), (3,), workspace_bytes=50,
                                                                       lingers=lingers),
            ProgramOp("last", False, 1.0, (3,), (4,)))
    program = StorageProgram(runs, storages, frozenset({4}), frozenset())
    assert simulate_memory(program, ()).forward.nbytes == nbytes
    unread = simulate_memory(replace(program, returned=frozenset()), ())
    assert "wait" not in {program.runs[k].name for k in unread.forward.order}


def test_scratch_is_there_while_a_call_runs():
    program = chain([10, 20, 30])
    runs = tuple(replace(run, scratch_bytes=100) if run.name == "f1" else run for run in program.runs)
    assert simulate_memory(program, {1}).backward.nbytes == (30, 60, 90, 80, 40)
    assert simulate_memory(replace(program, runs=runs), {1}).backward.nbytes == (130, 60, 90, 80, 40)


def slow_count(program: StorageProgram, order, start, held) -> list[int]:
    """No inlining, no reuse: what has been made and is still read later, or held."""
    runs = [program.runs[k if k >= 0 else -1 - k] for k in order]
    there, counted = set(start), []
    for position, run in enumerate(runs):
        there |= set(run.makes)
        later = {s for other in runs[position:] for s in other.reads} | set(held) | set(run.makes)
        there |= {s for other in runs[position:] for s in other.reads if program.storages[s].input_phase == "backward"}
        there = {s for s in there if s in later}
        counted.append(sum(program.storages[s].nbytes for s in there if program.storages[s].input_phase != "forward"))
    return counted


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_counts_as_a_slower_count_does(seed):
    program = random_program(seed)
    plain = StorageProgram(tuple(ProgramOp(r.name, r.backward, r.us, r.reads, r.makes, r.repeatable) for r in program.runs),
                           program.storages,
                           program.returned, program.gradients)
    kept = frozenset(s for k, s in enumerate(plain.candidates) if (seed >> (k % 5)) & 1) | plain.bound_to_keep
    walked = simulate_memory(plain, kept)
    kept = walked.saved
    assert list(walked.forward.nbytes) == slow_count(plain, walked.forward.order, (), kept | plain.returned)
    assert list(walked.backward.nbytes) == slow_count(
        plain, walked.backward.order, kept | plain.returned, plain.returned | plain.gradients)


def test_what_cannot_be_made_again_is_kept_only_where_it_is_needed():
    runs = (ProgramOp("noise", False, 1.0, (0,), (1,), False), ProgramOp("scaled", False, 1.0, (1,), (2,)),
            ProgramOp("back", True, 1.0, (2, 3), (4,)))
    storages = (Storage("x", 0, None, "forward"), Storage("noise", 4, 0), Storage("scaled", 4, 1),
                Storage("tangents", 0, None, "backward"), Storage("back", 1, 2))
    program = StorageProgram(runs, storages, frozenset(), frozenset({4}))
    assert simulate_memory(program, {2}).saved == {2} and simulate_memory(program, ()).saved == {1}
    assert not program.bound_to_keep, "backward does not read it"


@pytest.mark.parametrize("seed", range(6))
def test_which_of_two_walks_holds_less_is_what_their_peaks_say(seed):
    program, draw = random_program(seed, layers=8, offloading=True), random.Random(seed)
    choices = [{s for s in program.candidates if draw.random() < part} for part in (0.1, 0.3, 0.5, 0.7, 0.9)]
    for one, other in itertools.permutations(choices, 2):
        low, high = simulate_memory(program, one, one & program.offloadable), simulate_memory(program, other)
        assert low.holds_less_than(high) == (low.peak < high.peak)


def test_random_numbers_are_drawn_although_nothing_reads_them():
    def held(draws: bool) -> int:
        runs = (ProgramOp("mask", False, 1.0, (), (0,), False, draws=draws), ProgramOp("a", False, 1.0, (), (1,)))
        storages = (Storage("mask", 100, 0), Storage("a", 10, 1))
        return simulate_memory(StorageProgram(runs, storages, frozenset({1}), frozenset()), ()).forward.most_bytes

    assert (held(True), held(False)) == (100, 10)
