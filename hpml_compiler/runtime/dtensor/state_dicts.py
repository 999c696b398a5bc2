"""Full state dict of a sharded model, for one file that a single-device script can load."""
from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.consistency.input_check import RanksDiffer
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.process.world_group import from_all_ranks
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from passes.graph.fx_nodes import memory_of

CALLED_BY_ONE = "all ranks must call it, outside of `if rank == 0:`; rank 0 alone gets the state, and saves it"


def full_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The full state on rank 0, as plain tensors in CPU memory; `{}` on the other ranks. All ranks must call it.

    For a model alone it equals `model.state_dict()` on one device (with the names of the original model, also if
    `model` came from `torch.compile`). With an optimizer it is `{"model": ..., "optimizer": ...}`. Tensors are
    gathered one by one, so a rank holds at most one full tensor besides its own parts, and rank 0 those
    of the result. Nothing in it shares memory with the model.
    """
    require_all_ranks("hpml_compiler.full_state_dict", CALLED_BY_ONE, every=0)
    model = getattr(model, "_orig_mod", model)
    parts: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        parts["optimizer"] = optimizer.state_dict()
    _check_alike(parts)
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    with torch.no_grad():
        state = _HostCopies(keeps).of(parts)
    if not keeps:
        return {}
    return state if optimizer is not None else state["model"]


def _check_alike(state: Any) -> None:
    """Raises on all ranks if their placed tensors or names differ: ranks would wait for gathers that the others
    never make, or match the wrong tensors."""
    if not dist.is_initialized():
        return
    mine = [f"{name} {tuple(value.shape)} {value.dtype} {value.placements}"
            for name, value in _named(state) if isinstance(value, DTensor)]
    hashes = from_all_ranks(zlib.crc32("\n".join(mine).encode()))
    if len(set(hashes)) == 1:
        return
    found = from_all_ranks(mine)
    rank = next(rank for rank, other in enumerate(found) if hashes[rank] != hashes[0])
    pairs = itertools.zip_longest(found[0], found[rank], fillvalue="nothing")
    differs = next(pair for pair in pairs if len(set(pair)) > 1)
    raise RanksDiffer("the names or number of the model's tensors differ between ranks",
                      f"hpml_compiler.full_state_dict: rank 0 has {differs[0]} where rank {rank} has {differs[1]}",
                      "give the model the same parameters, buffers and optimizer state on all ranks")


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named(item, f"{name}.{index}")
    else:
        yield name, value


class _HostCopies:
    """Full CPU copies. Tensors that share memory in the model, such as tied weights, share it in the copies.

    Every rank gathers every placed tensor, also those that rank 0 has copied: the number of gathers must not depend on
    facts of one rank, such as its copies, or which of its parts share memory (those without rows).
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._made: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        """Memory -> (tensor, kept alive so that no other gets its address; its copy)."""

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy(value.detach())
        if isinstance(value, dict):
            result = {key: self.of(item) for key, item in value.items()}
            return result if self._keeps else {}
        if isinstance(value, (list, tuple)):
            items = [self.of(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        gathered = to_full_tensor(tensor)
        if not self._keeps:
            return None
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.layout != torch.strided:
            return gathered.to("cpu", copy=True)
        key = (memory_of(local), local.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._made:
            self._made[key] = local, gathered.to("cpu", copy=True)
        return self._made[key][1]
