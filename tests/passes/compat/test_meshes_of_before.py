"""A process group of the same ranks as before, in which this process has another rank -> no result has the mesh of before."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from passes import compat


def _offset(rank: int, value: torch.Tensor) -> tuple[int, ...]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    placed = DTensor.from_local(value, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False).detach()
    found = compat.local_shape_and_offset(placed.shape, placed.device_mesh, placed.placements)[1]
    dist.destroy_process_group()
    return found


def test_another_rank_of_an_equal_mesh() -> None:
    value = torch.zeros(3, 2)
    assert _offset(1, value) == (3, 0)
    compat.forget_interned_specs()
    assert _offset(0, value) == (0, 0)
