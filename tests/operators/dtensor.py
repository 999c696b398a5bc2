"""Coverage of DTensor's own strategies: an operand's dim is split over two fake ranks."""
from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.compat import pytree
from tests.operators import database

LIMIT = 6


@functools.cache
def _mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,))


def judge(name: str, of: dict[str, int] | None = None) -> dict[str, Any]:
    """how: split (some result of some sample is), replicated (it runs, and nothing stays split), or unsupported."""
    entry, mesh = database.entries()[name], _mesh()
    found, why = set(), ""
    for dtype in database.dtypes(entry)[:1]:
        for sample in database.samples(entry, dtype, LIMIT, of):
            tensors = database.tensors_of(sample)
            for dim in range(min(2, tensors[0].ndim) if tensors else 0):
                if tensors[0].shape[dim] % 2:
                    continue
                try:
                    given = [distribute_tensor(t.detach(), mesh, [Shard(dim)] if t.shape == tensors[0].shape else [Replicate()])
                             for t in tensors]
                    results = database.function_of(entry, sample)(*given)
                    split = any(isinstance(r, DTensor) and not r.placements[0].is_replicate()
                                for r in pytree.tree_leaves(results))
                    found.add("split" if split else "replicated")
                except Exception as error:
                    found.add("unsupported")
                    why = why or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    how = next((each for each in ("split", "replicated", "unsupported") if each in found), "nothing to split")
    return {"name": name, "how": how, "detail": why if how == "unsupported" else ""}
