"""Step graphs -> live bytes, op by op, worked out by hand."""
from __future__ import annotations

from passes.graph.step_phase import BACKWARD, FORWARD
from passes.simulation.memory.step_trace import trace_step
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, TransferHop


def call(name, phase, reads, nbytes=0, saved=False, block="", **more):
    return StepCall(name, phase, block, 1.0, tuple((read, "R") for read in reads), (float(nbytes),), (saved,), **more)


def forward(name, *reads, **more):
    return call(name, FORWARD, reads, **more)


def backward(name, *reads, **more):
    return call(name, BACKWARD, reads, **more)


def leg(value, reader, target, nbytes, collective="all_gather", sent=8.0, **more):
    return Transfer(value, reader, "S", target, (TransferHop(collective, "dp", sent, 2.0),), float(nbytes), **more)


def held(*calls, legs=(), device="", recompute=False, microbatches=1, **more):
    """Each op with the bytes while it runs, of forward and of backward."""
    trace = trace_step(StepGraph("g", True, calls, tuple(legs), **more), device, recompute, microbatches)
    runs = trace.program.runs
    return [[(runs[k].name if k >= 0 else f"{runs[-1 - k].name} again", nbytes) for k, nbytes in zip(phase.order, phase.nbytes)]
            for phase in (trace.forward, trace.backward)]


def test_what_backward_reads_is_in_memory_until_then_if_it_is_saved_and_made_again_if_not():
    def step(saved):
        return held(forward("a", "x", nbytes=8, saved=saved), forward("b", "a", nbytes=1), forward("c", "b", nbytes=16),
                    backward("d", "a", nbytes=2), backward("e", "d", nbytes=4, gradient=True))

    assert step(True) == [[("a", 8), ("b", 9), ("c", 25)], [("d", 8 + 16 + 2), ("e", 16 + 2 + 4)]]
    assert step(False) == [[("a", 8), ("b", 9), ("c", 17)], [("a again", 24), ("d", 26), ("e", 22)]]  # c is returned


def test_views_take_nothing_and_their_readers_read_the_storage():
    chain = forward("v", "a", nbytes=8, view_of="a"), forward("w", "v", nbytes=8, view_of="v"), forward("b", "w", nbytes=1)
    assert held(forward("a", "x", nbytes=8), *chain)[0] == [("a", 8), ("b", 9)]
    assert held(*chain)[0] == [("b", 1)]  # views of an input


def test_what_is_inlined_takes_nothing_unless_it_is_saved():
    def step(saved):
        return held(forward("a", "x", nbytes=5), forward("b", "a", nbytes=8, inlined=True, fusing=True, saved=saved),
                    forward("c", "b", nbytes=1, fusing=True), backward("d", "b", nbytes=2, gradient=True))

    assert step(False)[0] == [("a", 5), ("b", 5), ("c", 6)]
    assert step(True)[0] == [("a", 5), ("b", 13), ("c", 9)]


def test_scratch_and_tangents_and_gradients():
    calls = [forward("a", nbytes=8), forward("b", "a", nbytes=1, scratch_bytes=100.0)]
    assert held(*calls, device="cpu")[0] == [("a", 8), ("b", 109)] and held(*calls, device="cuda")[0] == [("a", 8), ("b", 9)]
    assert held(forward("a", "x"), backward("t", "tangent", nbytes=2), backward("g", "t", nbytes=4, gradient=True),
                backward("h", "t", nbytes=16, gradient=True), tangents={"tangent": 32.0})[1] == [
        ("t", 34), ("g", 6), ("h", 22)]


def test_a_call_of_backward_that_is_saved_is_run_by_forward_and_what_only_it_reads_not_at_all():
    calls = [forward("a", "x", nbytes=8), forward("loss", "a", nbytes=1), backward("sub", "a", nbytes=8),
             backward("twin", "sub", nbytes=3, saved=True), backward("g", "twin", nbytes=4, gradient=True)]
    assert held(*calls) == [[("a", 8), ("loss", 9), ("twin", 4)], [("g", 8)]]


def test_a_gathered_parameter_is_in_memory_from_the_block_before_its_reader():
    calls = [forward("a", "x", nbytes=1, block="h.0"), forward("b", "a", nbytes=2, block="h.1"),
             StepCall("c", FORWARD, "h.1", 1.0, (("b", "R"), ("w", "R")), (4.0,), (False,))]
    assert held(*calls, legs=[leg("w", "c", "R", 64)])[0] == [("w", 64), ("a", 65), ("b", 67), ("c", 70)]
    assert held(*calls, legs=[leg("w", "c", "R", 64)], device="cpu")[0][:2] == [("w", 128), ("a", 129)]  # gloo's own buffer
    view = StepCall("t", FORWARD, "h.1", 0.0, (("w", "R"),), (64.0,), (False,), view_of="w")
    calls[2:] = [view, StepCall("c", FORWARD, "h.1", 1.0, (("b", "R"), ("t", "R")), (4.0,), (False,))]
    assert held(*calls, legs=[leg("w", "t", "R", 64)])[0] == [("w", 64), ("a", 65), ("b", 67), ("c", 70)]


def test_a_copy_is_saved_in_place_of_what_it_was_made_from():
    calls = [forward("a", "x", nbytes=4, saved=True), StepCall("b", FORWARD, "", 1.0, (("a", "R"),), (1.0,), (False,)),
             StepCall("g", BACKWARD, "", 1.0, (("a", "R"),), (2.0,), (False,), gradient=True)]
    assert held(*calls, legs=[leg("a", "b", "R", 8)]) == [[("a", 4), ("a", 12), ("b", 9)], [("g", 11)]]


def test_gradients_share_a_bucket_and_only_their_shards_stay():
    def step(target, nbytes, collective):
        legs = [leg(name, "", target, nbytes, collective, gradient=True) for name in "gh"]
        return held(forward("a", "x"), *(backward(name, "x", nbytes=8, gradient=True) for name in "gh"), legs=legs)[1]

    assert step("R", 8, "all_reduce") == [("g", 8), ("h", 16), ("g", 16 + 16)]
    assert step("S", 4, "reduce_scatter") == [("g", 8), ("h", 16), ("g", 16 + 16)]


def test_what_is_gathered_to_be_returned_stays_until_backward_ends():
    assert held(forward("a", "x", nbytes=4), backward("d", "x", nbytes=1, gradient=True), legs=[leg("a", "", "R", 64)]) == [
        [("a", 4), ("a", 68)], [("d", 65)]]


def test_gradients_add_up_over_microbatches_and_activations_do_so_only_where_all_forwards_come_first():
    calls = [forward("a", "x", nbytes=8, saved=True), backward("g", "a", nbytes=4, gradient=True)]
    assert held(*calls, microbatches=2) == [[("a", 12)], [("g", 16)]]
    assert held(*calls) == [[("a", 8)], [("g", 12)]]
    graph = StepGraph("g", True, tuple(calls), microbatches=3, at_once=False)
    assert trace_step(graph).forward.nbytes == (3 * 8,)
    assert trace_step(graph).backward.nbytes == (3 * 8 + 4,)  # of the first one: the others' gradients come later


def test_recomputed_blocks_keep_what_crosses_them():
    calls = [forward(f"{name}{k}", source, nbytes=nbytes, saved=True, block=f"h.{k}")
             for k, before in enumerate(("x", "out0")) for name, source, nbytes in (("in", before, 100), ("out", f"in{k}", 1))]
    back = [backward(f"back{k}", f"in{k}", f"out{k}", nbytes=1, gradient=True, block=f"h.{k}") for k in (1, 0)]
    assert max(nbytes for phase in held(*calls, *back) for _, nbytes in phase) == 203
    assert max(nbytes for phase in held(*calls, *back, recompute=True) for _, nbytes in phase) == 103


def test_layers_that_one_stands_for_are_counted_one_by_one():
    def model(listed):
        names = range(4 if listed is None else 1)
        runs = {} if listed is None else {"runs": 4}
        calls = [forward(f"f{k}", f"f{k - 1}" if k else "x", nbytes=8, saved=True, block=f"h.{k}", **runs) for k in names]
        return [*calls, *(backward(f"g{k}", f"f{k}", nbytes=2, gradient=True, block=f"h.{k}", **runs) for k in reversed(names))]

    whole, short = held(*model(None)), held(*model(1))
    assert [[nbytes for _, nbytes in phase] for phase in whole] == [[nbytes for _, nbytes in phase] for phase in short]
    assert [name for name, _ in short[0]] == [f"f0 [{k}]" for k in range(4)]
