"""Foreach ops on lists that mix placed and plain tensors."""
from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.dispatch_table import in_place
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor


def is_foreach(name: str) -> bool:
    """True if a torch function takes lists and works on their tensors index by index."""
    return name.startswith(("_foreach_", "_fused_"))


def is_composite(func: Callable[..., Any]) -> bool:
    """True for a function of `torch.foreach`, which torch 2.15 has: Python code around the `_foreach_` function, under the
    name of the function of single tensors."""
    return isinstance(func, FunctionType) and func.__module__ == "torch.foreach"


def split_by_kind(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Split a list's indices into those with a placed result and those with a plain one.

    An op that writes keeps the kind of its target; a new result is placed if all its operands are.
    """
    lists = _lists(args, kwargs)

    def is_placed(index: int) -> bool:
        if in_place(name):
            return isinstance(lists[0][index], DTensor)
        return all(isinstance(values[index], DTensor) for values in lists if values[index].dim())

    placed = [is_placed(index) for index in range(len(lists[0]))]
    return [i for i, kind in enumerate(placed) if kind], [i for i, kind in enumerate(placed) if not kind]


def at(indices: list[int], value: Any) -> Any:
    """Select these indices of a list, or of a tensor with a number per index; other arguments are returned
    unchanged."""
    if isinstance(value, torch.Tensor):
        return to_full_tensor(value)[indices] if value.dim() else value
    return [value[i] for i in indices] if isinstance(value, (list, tuple)) else value


def merge(parts: list[tuple[list[int], Any]]) -> tuple[Any, ...] | None:
    """Merge the results of the two kinds of indices; None if the op returned nothing."""
    if any(results is None for _, results in parts):
        return None
    merged = {index: result for indices, results in parts for index, result in zip(indices, results, strict=True)}
    return tuple(merged[index] for index in sorted(merged))


def like_targets(place_like: Callable[[torch.Tensor, Any], torch.Tensor], args: tuple,
                 kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in which plain tensors are placed like their targets."""
    targets = _lists(args, kwargs)[0]

    def alike(value: Any) -> Any:
        if not _is_list(value):
            return value
        return [place_like(tensor, target) if tensor.dim() and tensor.shape == target.shape else tensor
                for tensor, target in zip(value, targets, strict=True)]

    return [alike(value) for value in args], {key: alike(value) for key, value in kwargs.items()}


def unscale(func: Callable[..., Any], gradients: list[torch.Tensor], found_inf: torch.Tensor,
            inverse_scale: torch.Tensor) -> None:
    """`GradScaler`'s unscale op: runs on local parts, then an infinity on one rank counts on all.

    DTensor's rule derives from the first gradient alone whether ranks hold different shards.
    """
    func([t._local_tensor if isinstance(t, DTensor) else t for t in gradients], found_inf, inverse_scale)
    # In the order of the gradients: the order of a set differs between ranks.
    for mesh in dict.fromkeys(t.device_mesh for t in gradients if isinstance(t, DTensor)):
        for axis in range(mesh.ndim):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(axis))


def _lists(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    return [value for value in (*args, *kwargs.values()) if _is_list(value)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)
