"""The ranks' device: device names -> kind and sharing, or an error; gloo collectives through host memory."""
from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpml_compiler.runtime.process import compute_device, world_group
from hpml_compiler.runtime.process.compute_device import RankDevice, agreed
from passes import compat
from passes.errors import BadInput

BOTH, NCCL, GLOO = "cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize(("names", "backends", "found"), [
    (["cpu", "cpu"], BOTH, RankDevice("cpu")), (["a: 0", "a: 1"], NCCL, RankDevice("cuda", 1)),
    (["a: 0", "b: 0"], BOTH, RankDevice("cuda", 1)), (["a: 0", "a: 0"], GLOO, RankDevice("cuda", 2)),
    (["a: 0", "a: 0", "a: 1", "a: 1"], GLOO, RankDevice("cuda", 2)),
])
def test_names_of_devices_say_what_ranks_compute_on(names, backends, found):
    assert agreed(names, 0, backends) == found


@pytest.mark.parametrize(("names", "backends", "words"), [
    (["a: 0", "cpu"], BOTH, "rank 1 computes on a CPU and rank 0 on a GPU"),
    (["a: 1", "a: 0", "a: 0"], BOTH, r"ranks \[1, 2\] use the same GPU.*\n.*\n.*set_device.*hpml run.*cuda:gloo"),
])
def test_devices_that_cannot_work_together_are_refused(names, backends, words):
    with pytest.raises(BadInput, match=words):
        agreed(names, 0, backends)


class _FakeGpus:
    """What `compute_device` asks torch.cuda, for a machine that has none."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.current = name, count, 0

    def install(self) -> None:
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: self.count
        torch.cuda.current_device = lambda: self.current
        torch.cuda.set_device = lambda index: setattr(self, "current", index)
        compute_device.gpu_name = lambda: f"{self.name}{self.current}"


def _groups(rank: int) -> dict:
    """The groups made where every rank sees one GPU, which is the same; its own; and where it sees two."""
    made, begun, real = {}, [], dist.init_process_group
    dist.init_process_group = lambda backends, **how: begun.append((backends, "store" in how))
    for case, gpus in {"shared": _FakeGpus("a", 1), "own": _FakeGpus(f"a{rank}", 1), "all": _FakeGpus("a", 2)}.items():
        gpus.install()
        compute_device.init_group_on_gpus(timedelta(seconds=30))
        made[case] = (*begun.pop(), gpus.current)
    real("cpu:gloo,cuda:gloo", timeout=timedelta(seconds=30))
    made["before a graph"] = compute_device.device_type()
    compute_device.init_device([torch.ones(2)])
    made["after one on the CPU"] = compute_device.device_type(), compute_device.ranks_on_this_device()
    return made


def test_the_backend_for_cuda_is_nccl_unless_ranks_share_a_gpu(launch):
    for rank, made in enumerate(launch(_groups, init=False)):
        assert made == {
            "shared": (GLOO, True, 0), "own": (BOTH, True, 0), "all": (BOTH, False, rank),
            "before a graph": "cuda", "after one on the CPU": ("cpu", 1),
        }


def _staged(rank: int) -> list[str]:
    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    rows = torch.arange(4.0).view(2, 2) + 10 * rank
    calls = {
        "all_reduce": (rows, "sum", name), "all_gather_into_tensor": (rows, 2, name),
        "reduce_scatter_tensor": (rows, "sum", 2, name), "all_to_all_single": (rows, [1, 1], [1, 1], name),
        "broadcast": (rows, 1, name), "all_gather_into_tensor_coalesced": ([rows, rows + 1], 2, name),
    }
    wrong = []
    for op, args in calls.items():
        packet = getattr(c10d, op).default
        expected = compat.pytree.tree_map(c10d.wait_tensor, packet(*args))
        found = compat.through_host(packet)(*args)
        if not compat.pytree.tree_all(lambda x: x, compat.pytree.tree_map(torch.equal, found, expected)):
            wrong.append(op)
    changed, out = rows.clone(), torch.empty(4, 2)
    if compat.through_host(c10d.all_reduce_.default)(changed, "sum", name) is not changed or changed[0, 0] != 10:
        wrong.append("all_reduce_")
    if compat.through_host(c10d.all_gather_into_tensor_out.default)(rows, 2, name, out=out) is not out or out[2, 0] != 10:
        wrong.append("all_gather_into_tensor_out")
    return wrong


def _gathered(rank: int) -> tuple[list[str], set[str]]:
    """Gathers that differ from torch's own, and what the process group was asked for."""
    gather, name = torch.ops._c10d_functional.all_gather_into_tensor.default, dist.group.WORLD.group_name
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank, torch.arange(2) > rank, torch.ones(0, 3), torch.full((2, 1), rank + 2j)]

    def gathers() -> list[torch.Tensor]:
        return [torch.ops._c10d_functional.wait_tensor(begun) for begun in [gather(part, 2, name) for part in parts]]

    before = gathers()
    world_group.ensure_process_group()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        after = gathers()
    wrong = [f"{x}, not {y}" for x, y in zip(after, before, strict=True) if not torch.equal(x, y) or x.stride() != y.stride()]
    return wrong, {event.name for event in profile.events() if event.name.startswith("c10d::")}


def test_gathers_over_gloo_are_those_of_torch_but_never_of_several_tensors_together(launch):
    assert launch(_gathered) == [([], {"c10d::_allgather_base_"})] * 2  # two of the others that end at once corrupt the heap


def test_collectives_by_way_of_the_host_are_those_they_stand_for(launch):
    assert launch(_staged) == [[], []]


def test_they_are_registered_for_one_kind_of_device():
    op = "_c10d_functional::all_gather_into_tensor"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, "XPU")
    compat.collectives_through_host("XPU")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "XPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, "HPU")


def test_without_ranks_the_kind_is_that_of_the_machine(monkeypatch):
    assert compute_device.device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compute_device.device_type() == "cuda" and "RANK" not in os.environ


def test_a_group_that_sends_nothing_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(BadInput, match=r"a 'fake' process group sends nothing[\s\S]*hpml plan"):
            world_group.from_all_ranks(0)
    finally:
        dist.destroy_process_group()
