"""Events of torch's profiler -> time by class of work, and the peak of tensor memory."""
from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from hpml_compiler.monitor.profiled_step import GRAPH_RANGE, KernelTimes, ProfilerEvent, StepProfile, graph_us, kernel_us, peak
from hpml_compiler.monitor.step_recorder import StepTimes
from hpml_compiler.runtime.optimizer.resident_memory import OldGradients, held_bytes, storage_bytes
from passes import compat

MIB = 2**20


def events(*rows):
    """(name, from us, to us, thread)."""
    return [ProfilerEvent(name, int(start * 1000), int(end * 1000), *rest) for name, start, end, *rest in rows]


def test_own_time_of_nested_operations_inside_graphs():
    found = graph_us(events(
        ("aten::mm", 0, 9), (GRAPH_RANGE, 10, 110), ("## Call CompiledFxGraph f7 ##", 20, 100), ("aten::addmm", 30, 50),
        ("aten::copy_", 35, 40), ("_c10d_functional::all_reduce", 50, 60), ("aten::clone", 52, 56), ("aten::add", 60, 63),
        ("Optimizer.step#AdamW.step", 120, 150), ("aten::mul_", 121, 122), ("gloo:all_reduce", 40, 90, 7),
    ))
    assert found == {"overhead": 20.0, "pointwise": 80 - 20 - 10 - 3 + 3.0, "matmul": 20.0, "collective": 10.0}


def test_graphs_inside_an_optimizer_with_a_closure_are_graphs():
    found = graph_us(events(("Optimizer.step#LBFGS.step", 0, 100), (GRAPH_RANGE, 10, 40), ("aten::mm", 10, 30)))
    assert found == {"matmul": 20.0, "overhead": 10.0}


def test_kernels_have_the_class_of_what_launched_them_or_their_own():
    launches = [ProfilerEvent("Optimizer.step#AdamW.step", 0, 20_000), ProfilerEvent("aten::_foreach_add_", 1000, 2000, id=1),
                ProfilerEvent(GRAPH_RANGE, 30_000, 60_000), ProfilerEvent("## Call CompiledFxGraph f7 ##", 31_000, 59_000,
                                                                          id=2),
                ProfilerEvent("aten::mm", 32_000, 33_000, id=3),
                ProfilerEvent("_c10d_functional::all_reduce", 34_000, 35_000, id=4),
                ProfilerEvent("aten::clip", 70_000, 71_000, id=5)]
    kernels = [ProfilerEvent(name, start, start + us * 1000, on_device=True, operation=operation) for name, start, us,
               operation in (
        ("void at::native::multi_tensor_apply_kernel<4>", 100_000, 7, 1), ("triton_poi_fused_add_0", 110_000, 5, 2),
        ("nvjet_tst_128x152", 120_000, 11, 2), ("void some_new_kernel", 140_000, 13, 3),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 120_000, 17, 4), ("void at::native::clip", 160_000, 19, 5),
    )]
    assert kernel_us([*kernels, *launches]) == {"optimizer": 7.0, "pointwise": 5.0, "matmul": 24.0, "collective": 17.0}


def test_shares_of_the_profile_make_up_the_time_measured_without_it():
    profiled = KernelTimes({"matmul": 30.0, "overhead": 10.0}, False, None)
    found = profiled.of_step(StepTimes(step_us=100.0, graphs_us=20.0, optimizer_us=50.0))
    assert found == {"matmul": 15.0, "optimizer": 50.0, "overhead": 5.0 + 30.0}
    assert sum(found.values()) == 100.0


def test_kernels_take_what_they_take_and_the_rest_is_overhead():
    profiled = KernelTimes({"matmul": 30.0, "optimizer": 20.0}, True, None)
    assert profiled.of_step(StepTimes(80.0, 20.0, 50.0)) == {"matmul": 30.0, "optimizer": 20.0, "overhead": 30.0}
    assert profiled.of_step(StepTimes(40.0, 20.0, 50.0))["overhead"] == 0.0, "kernels overlap"


@pytest.mark.parametrize(("changes", "notes", "expected"), [
    ([], [], 0), ([(1, 5), (2, -5), (3, 4)], [], 5), ([(3, 4), (1, 5), (2, -5)], [], 5), ([(1, -5), (2, 3)], [], 0),
    # 10 bytes are there until some time between 4 and 6, of which 5 has to do without
    ([(1, 5), (5, 7)], [(0, 10), (4, 10), (6, 0)], 15), ([(1, 5), (5, 11)], [(0, 10), (4, 10), (6, 0)], 16),
    ([(9, 3)], [(0, 10), (4, 2)], 10), ([(9, 30)], [(0, 10), (4, 2)], 32),
])
def test_peak(changes, notes, expected):
    assert peak(changes, notes) == expected


def test_a_real_profile_of_matrix_products_on_known_bytes():
    """Two buffers of 4 MiB at a time, one of 1 MiB after them; what was held before is not seen going."""
    a, before = torch.ones(1024, 1024), [torch.ones(MIB)]
    profile = StepProfile("cpu")
    entered = profile.begin_graph()
    for _ in range(5):
        b = torch.mm(a, a)
        del b
    b = torch.mm(a, a) + 1  # both for a moment
    del b
    before.clear()
    profile.end_graph(entered)
    torch.mm(a, a)
    found = profile.stop(steady_bytes=100)
    assert found is not None and found.peak_bytes is not None
    assert 8 * MIB + 100 <= found.peak_bytes < 8 * MIB + 20_000
    assert set(found.classes_us) <= {"matmul", "pointwise", "overhead"}
    assert found.classes_us["matmul"] > found.classes_us["pointwise"] > 0
    assert not compat.profiler_is_on()


def test_profiling_is_silent():
    """In a process of its own, where nobody has profiled before."""
    script = """
import torch
from hpml_compiler.monitor.profiled_step import StepProfile
before = torch.ones(1000)
profile = StepProfile("cpu")
del before
profile.stop()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_profiler_s_times_are_those_that_notes_are_taken_by():
    profile = StepProfile("cpu")
    start = time.time_ns()
    torch.ones(MIB)
    end = time.time_ns()
    profile.stop()
    seen = [e for e in profile._profile.profiler.kineto_results.events() if e.name() == "aten::ones"]
    assert start - 1_000_000 < seen[0].start_ns() < end + 1_000_000


def test_a_profile_of_the_script_s_own_inside_is_not_harmed_and_has_seen_what_this_one_has_not():
    profile = StepProfile("cpu")
    with torch.profiler.profile() as own:
        torch.ones(3)
    assert profile.stop() is None
    assert "aten::ones" in {event.key for event in own.key_averages()}
    again = StepProfile("cpu")
    held = torch.ones(1000)
    found = again.stop()
    assert found is not None and found.peak_bytes == held.nbytes


def test_bytes_of_what_is_held():
    model = nn.Linear(10, 6)
    frozen = nn.Parameter(torch.ones(7), requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    assert held_bytes([optimizer], [frozen, model.weight]) == {
        "parameters": 4 * (66 + 7), "gradients": 4 * 66, "optimizer": 4 * (2 * 66 + 2)}  # and a count of steps for each
    assert storage_bytes([frozen, frozen.detach(), frozen[2:]]) == 28


def test_old_gradients_go_when_they_are_replaced_not_when_they_are_added_to():
    model = nn.Linear(10, 6)
    model(torch.ones(2, 10)).sum().backward()
    old = OldGradients(model.parameters())
    assert old.bytes_left() == 4 * 66
    model(torch.ones(2, 10)).sum().backward()
    assert old.bytes_left() == 4 * 66
    model.bias.grad = torch.ones(6)
    assert old.bytes_left() == 4 * 60
    model.zero_grad()
    model(torch.ones(2, 10)).sum().backward()
    assert old.bytes_left() == 0
