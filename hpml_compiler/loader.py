"""`distribute(loader)`: each rank holds, moves and computes only its rows of every batch."""
from __future__ import annotations

import copy
import dataclasses
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.runtime.rows import take_rows
from hpml_compiler.runtime.world import device_type, ensure_process_group, world_mesh
from passes.errors import BadInput

log = logging.getLogger(__name__)


def distribute(loader: Iterable[Any]) -> Iterable[Any]:
    """Wrap an iterable of batches so that each rank keeps only its rows of them.

    Every rank must iterate the same batches in the same order, as a script written for one device does: no
    DistributedSampler, and a seed before a shuffling loader. (Checked on the first batch of each iteration.) A batch is
    a tensor or any nest of tensors in lists, tuples, dicts and dataclasses. Each of its tensors becomes a DTensor,
    `Shard(0)` over all ranks, that the script may use as the whole tensor; one whose first dim the ranks do not divide
    stays whole on every rank, with a warning. Length and attributes are those of `loader`. With one rank, batches are
    left as they are.
    """
    return _Distributed(loader)


class _Distributed:
    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._warned = False

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet there, while being unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if ensure_process_group() == 1:
            yield from self._loader
            return
        for number, batch in enumerate(self._loader):
            if number == 0:
                _check_equal(batch)
            yield map_batch(self._rows, batch)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        mesh = world_mesh()
        if tensor.dim() and tensor.shape[0] % mesh.size() == 0:
            return take_rows(tensor, mesh)
        if tensor.dim() and not self._warned:
            self._warned = True
            log.warning("a tensor with %d rows stays whole on every rank: %d ranks do not divide it. Use a batch size "
                        "that they divide, and drop_last=True", tensor.shape[0], mesh.size())
        return tensor


def map_batch(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """A batch of the same structure and types with `function` applied to its tensors."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        result = copy.copy(batch)
        for key, value in batch.items():
            result[key] = map_batch(function, value)
        return result
    if isinstance(batch, (list, tuple)):
        items = [map_batch(function, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(result, field.name, map_batch(function, getattr(batch, field.name)))
        return result
    return batch


def _check_equal(batch: Any) -> None:
    found: list[torch.Tensor] = []
    map_batch(lambda tensor: found.append(tensor) or tensor, batch)
    checksum = zlib.crc32(repr([tuple(tensor.shape) for tensor in found]).encode())
    for tensor in found:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        checksum = zlib.crc32(data.numpy().tobytes(), checksum)
    mine = torch.tensor([checksum], device=device_type())
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, mine)
    different = [rank for rank, other in enumerate(sums) if int(other) != int(sums[0])]
    if different:
        raise BadInput(
            "ranks iterate different batches, but hpml_compiler.distribute takes each rank's rows out of the same one",
            f"first batch of the loader on rank {dist.get_rank()}: other data on ranks {different} than on rank 0",
            "seed the loader's shuffling alike on all ranks (torch.manual_seed), and use no DistributedSampler",
        )
