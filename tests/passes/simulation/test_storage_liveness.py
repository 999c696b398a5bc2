"""Step graphs -> live bytes: small ones by hand, random ones against a check of all instants."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.graph.step_phase import BACKWARD, FORWARD
from passes.simulation.rank_lanes import one_lane, peak_bytes
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, TransferHop

ENTER_US = 1.0  # entering forward, and backward


def call(name, phase, reads, nbytes=0, saved=False, block="", kernel="matmul", **more):
    return StepCall(name, phase, block, 1.0, tuple((read, "R") for read in reads), (float(nbytes),), (saved,), kernel=kernel,
                    fused=name, **more)


def forward(name, *reads, **more):
    return call(name, FORWARD, reads, **more)


def backward(name, *reads, **more):
    return call(name, BACKWARD, reads, **more)


def held(*calls, legs=(), overlap=False, microbatches=1, recompute=False, **more) -> list[int]:
    """Bytes from each change on, up to the end of the step."""
    graph = StepGraph("g", True, calls, tuple(legs), call_us=ENTER_US, optimizer_us=1.0, **more)
    lanes = one_lane([graph], overlap=overlap, microbatches=microbatches, recompute=recompute)
    spans = lanes.run(1.0)
    return [nbytes for us, nbytes in lanes.memory(spans)[0] if us < spans.end_us]


def test_what_backward_reads_is_held_until_then_if_it_is_saved():
    def step(saved):
        return held(forward("a", "x", nbytes=8, saved=saved), forward("b", "a", nbytes=1), forward("c", "b", nbytes=1),
                    backward("d", "a", nbytes=2), backward("e", "d", nbytes=4))

    assert step(True) == [0, 8, 9, 10, 8, 10, 6, 0]
    assert step(False) == [0, 8, 9, 2, 0, 10, 6, 0]


def test_a_view_holds_the_storage_that_it_shows_and_nothing_of_its_own():
    with_view = held(forward("a", "x", nbytes=8), forward("v", "a", nbytes=8, view_of="a"), forward("b", nbytes=1),
                     forward("c", "v", nbytes=1))
    assert with_view == [0, 8, 9, 0]
    assert max(held(forward("a", "x", nbytes=8), forward("v", "a", nbytes=8), forward("c", "v", nbytes=1))) == 16


def test_a_view_of_a_view_shows_the_first_storage_and_one_of_an_input_none():
    chain = [forward("v", "a", nbytes=8, view_of="a"), forward("w", "v", nbytes=8, view_of="v"), forward("b", "w", nbytes=1)]
    assert max(held(forward("a", "x", nbytes=8), *chain)) == 9
    assert max(held(*chain)) == 1


def test_what_a_call_takes_besides_is_held_while_it_runs():
    assert held(forward("a", nbytes=8), forward("b", "a", nbytes=1, scratch_bytes=100.0), forward("c", "b", nbytes=1)) == [
        0, 8, 109, 2, 0]


def test_gradients_are_held_to_the_end_and_tangents_until_they_are_read():
    assert held(forward("a", "x"), backward("t", "tangent", nbytes=2), backward("g", "t", nbytes=4, gradient=True),
                backward("h", "t", nbytes=16, gradient=True), tangents={"tangent": 32.0}) == [0, 32, 34, 6, 22, 20]


def test_what_is_not_saved_is_made_again_from_what_it_came_of_which_lives_on_for_that():
    """b is recomputed in the kernel that reads it, from a: a is saved and lives until then, b itself takes nothing."""
    step = [forward("a", "x", nbytes=8, saved=True), forward("b", "a", nbytes=4), forward("c", "b")]
    assert held(*step, backward("d", nbytes=1), backward("e", "b", kernel="pointwise")) == [0, 8, 12, 8, 9, 8, 0]


def gather(nbytes=64, value="w", reader="a", source="S", target="R"):
    return Transfer(value, reader, source, target, (TransferHop("all_gather", "dp", 8.0, 2.0),), float(nbytes))


def test_a_gathered_parameter_is_held_while_its_reader_needs_it():
    reads = StepCall("a", FORWARD, "", 1.0, (("w", "R"),), (4.0,), (False,), kernel="matmul")
    assert held(reads, forward("b", "a", nbytes=1), legs=[gather()]) == [0, 64, 68, 5, 0]


def test_a_gradient_is_held_whole_until_it_is_reduced_and_what_is_left_to_the_end():
    scatter = Transfer("g", "", "P", "S", (TransferHop("reduce_scatter", "dp", 8.0, 2.0),), 2.0, gradient=True)
    assert held(forward("a", "x"), backward("g", "x", nbytes=8, gradient=True), backward("h", nbytes=1), legs=[scatter]) == [
        0, 8, 9, 8, 2]


def test_gradients_that_go_together_are_copied_into_a_bucket():
    legs = [Transfer(name, "", "P", "R", (TransferHop("all_reduce", "dp", 8.0, 2.0),), 8.0, gradient=True) for name in "gh"]
    assert held(forward("a", "x"), *(backward(name, "x", nbytes=8, gradient=True) for name in "gh"), legs=legs) == [
        0, 8, 16, 32, 16]


def test_what_is_gathered_to_be_returned_stays_until_the_microbatch_is_over():
    out = Transfer("a", "", "S", "R", (TransferHop("all_gather", "dp", 8.0, 2.0),), 64.0)
    assert held(forward("a", "x", nbytes=4), backward("d", "x", nbytes=1), legs=[out]) == [0, 4, 64, 65, 0]


def test_gradients_add_up_over_microbatches_and_activations_do_not():
    calls = [forward("a", "x", nbytes=8, saved=True), backward("g", "a", nbytes=4, gradient=True)]
    assert held(*calls, microbatches=2, accumulate_us=1.0) == [0, 8, 12, 4, 12, 4]


def test_recomputed_blocks_keep_what_crosses_them():
    """Two blocks of two calls: from forward, only what the next block reads is held for backward."""
    calls = [forward(f"{name}{k}", source, nbytes=nbytes, saved=True, block=f"h.{k}")
             for k, before in enumerate(("x", "out0")) for name, source, nbytes in (("in", before, 100), ("out", f"in{k}", 1))]
    back = [backward(f"back{k}", f"in{k}", f"out{k}", block=f"h.{k}") for k in (1, 0)]
    assert max(held(*calls, *back)) == 202
    assert max(held(*calls, *back, recompute=True)) == 102  # out0; a block's inside and its result again


def test_the_peak_counts_what_is_always_held():
    graph = StepGraph("g", True, (forward("a", nbytes=8),), parameter_bytes=100.0, optimizer_bytes=200.0, gradient_bytes=50.0,
                      trained_bytes=(60.0, 40.0), optimizer_us=1.0)
    lanes = one_lane([graph], update_bytes=120.0)
    assert lanes.held == [{"parameters": 100.0, "optimizer": 200.0, "gradients": 50.0}]  # no call is seen to make gradients
    assert peak_bytes(lanes) == 350 + 120  # while the optimizer runs


# --- random graphs against a walk over all instants -------------------------------------------------------------------


@st.composite
def steps(draw):
    """Forward calls that read what is before them, then backward ones that read anything."""
    calls: list[StepCall] = []
    forwards, backwards = draw(st.integers(1, 7)), draw(st.integers(0, 6))
    for k in range(forwards + backwards):
        phase = FORWARD if k < forwards else BACKWARD
        known = [call.name for call in calls] + ["x"] + ["tangent"] * (phase == BACKWARD)
        reads = draw(st.lists(st.sampled_from(known), max_size=3))
        is_view = bool(reads) and draw(st.booleans()) and draw(st.booleans())
        results = draw(st.integers(1, 2))
        kind = draw(st.sampled_from(["matmul", "pointwise", "view"]))
        calls.append(StepCall(
            f"n{k}", phase, "", float(draw(st.integers(1, 3))), tuple((read, "R") for read in reads),
            tuple(draw(st.lists(st.integers(0, 1 << 12).map(float), min_size=results, max_size=results))),
            tuple(draw(st.lists(st.booleans(), min_size=results, max_size=results))),
            view_of=reads[0] if is_view else None, scratch_bytes=float(draw(st.sampled_from([0, 0, 1 << 14]))), kernel=kind,
            fused=draw(st.integers(0, 2)), gradient=phase == BACKWARD and not is_view and draw(st.integers(0, 3)) == 0,
        ))
    return StepGraph("g", True, tuple(calls), tangents={"tangent": 7.0}, call_us=ENTER_US)


class Instants:
    """What is alive at an instant, rule by rule, in a step whose calls run one after another."""

    def __init__(self, graph: StepGraph):
        self.graph, self.when, now = graph, {}, int(ENTER_US)
        self.calls = {call.name: call for call in graph.calls}
        self.begins = None  # backward
        for call in graph.calls:
            if call.phase == BACKWARD and self.begins is None:
                self.begins, now = now, now + int(ENTER_US)
            self.when[call.name] = range(now, now + int(call.us))
            now += int(call.us)
        if self.begins is None:
            self.begins, now = now, now + int(ENTER_US)
        self.end = now

    def owner(self, name):
        return self.owner(self.calls[name].view_of) if name in self.calls and self.calls[name].view_of else name

    def readers(self, storage, phase):
        return [c for c in self.graph.calls if c.phase == phase and any(self.owner(v) == storage for v, _ in c.reads)]

    def through(self, start, calls, instant):
        """Whether an instant is between a start and the end of the last of these calls."""
        return start <= instant <= max((self.when[c.name][-1] for c in calls), default=start - 1)

    def fused_away(self, call):
        readers = [c for c in self.graph.calls if call.name in (v for v, _ in c.reads)]
        kernels = {(c.fused, c.block, c.phase) for c in [call, *readers]}
        return bool(readers) and len(kernels) == 1 and not any(call.saved)

    def users_in_backward(self, storage):
        """Backward's readers, and those of anything unsaved that is made again from this storage."""
        found = self.readers(storage, BACKWARD)
        for call in self.readers(storage, FORWARD):
            if self.owner(call.name) == call.name and not call.saved_bytes:
                found += self.users_in_backward(call.name)
        return found

    def of_call(self, call, instant):
        start = self.when[call.name][0]
        if instant < (self.begins if call.phase == BACKWARD else 0):
            return 0
        total = call.scratch_bytes * (instant in self.when[call.name])
        if self.owner(call.name) != call.name:
            return total
        if call.gradient:
            return total + call.bytes * (instant >= start)
        rest = 0 if self.fused_away(call) else call.bytes - call.saved_bytes
        if call.phase == BACKWARD:  # if anything of it is saved, forward has run it
            users = [call, *self.readers(call.name, BACKWARD)]
            born = self.begins if call.saved_bytes else start
            return total + (call.saved_bytes + rest) * self.through(born, users, instant)
        near = [call, *self.readers(call.name, FORWARD)]
        again = [c for c in self.readers(call.name, BACKWARD) if call.saved_bytes or c.kernel == "matmul"]
        made_again = bool(again) and self.through(self.when[again[0].name][0], again, instant)
        return total + call.saved_bytes * self.through(start, near + self.users_in_backward(call.name), instant) + (
            rest * (self.through(start, near, instant) or made_again))

    def bytes_at(self, instant):
        tangent = self.readers("tangent", BACKWARD)
        last = max([self.begins, *(self.when[c.name][-1] for c in tangent)])
        return sum(self.of_call(call, instant) for call in self.graph.calls) + 7 * (self.begins <= instant <= last)


@given(steps())
@settings(max_examples=60)
def test_at_every_instant_what_is_held_is_what_the_rules_say(graph):
    lanes, oracle = one_lane([graph]), Instants(graph)
    spans = lanes.run(1.0)
    assert spans.end_us == oracle.end
    (curve,) = lanes.memory(spans)
    for instant in range(oracle.end):
        held_now = [nbytes for us, nbytes in curve if us <= instant + 0.5][-1]
        assert held_now == oracle.bytes_at(instant), instant


@pytest.mark.parametrize("overlap", [True, False])
def test_a_call_that_takes_no_time_makes_its_result_when_the_one_before_is_done(overlap):
    free = StepCall("b", FORWARD, "", 0.0, (("a", "R"),), (4.0,), (False,), fused="b")
    assert held(forward("a", "x", nbytes=8), free, forward("c", "b", nbytes=1), overlap=overlap) == [0, 8, 5, 0]
