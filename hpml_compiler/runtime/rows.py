"""Rows of a batch: each rank holds some, and the script sees them all."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from hpml_compiler.runtime.eager import changed_tensors, map_tensors, on_fakes, on_whole
from hpml_compiler.runtime.local_ops import wrap
from hpml_compiler.runtime.placed import PlacedTensor, name_slots
from hpml_compiler.runtime.routes import KEEPS_ROWS
from hpml_compiler.runtime.whole import whole
from passes import compat


class Rows(PlacedTensor):
    """A tensor of a batch, `Shard(0)` over all ranks, that acts as the whole tensor at its first use.

    Moves and casts (`.to(device)`, `.float()`) and pointwise ops on rows alone stay rows. In a compiled graph it is the
    whole tensor, of which the plan takes what each rank needs. Any other op gathers it, and makes a plain tensor.
    """

    __slots__ = ()

    @classmethod
    def _route(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if isinstance(first, DTensor) and compat.is_fake(first._local_tensor):
            return on_fakes(func, args, kwargs)
        changed = changed_tensors(name, args, kwargs)
        if changed and isinstance(changed[0], DTensor) and not isinstance(changed[0], Rows):
            # a parameter, changed by a value that happens to be rows
            return PlacedTensor._route(func, name, map_tensors(_gathered, args), map_tensors(_gathered, kwargs))
        if name in KEEPS_ROWS and isinstance(first, Rows) and not any(isinstance(a, DTensor) for a in args[1:]):
            local = func(first._local_tensor, *args[1:], **kwargs)
            return wrap(local, cls, first._spec) if isinstance(local, torch.Tensor) else local
        return on_whole(func, args, kwargs)


name_slots(Rows)


def take_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> Rows:
    """This rank's rows of a whole tensor that is equal on all ranks, copied. The ranks must divide the rows."""
    count, rows = mesh.size(), tensor.shape[0]
    if rows % count:
        raise ValueError(f"{rows} rows cannot be divided among {count} ranks")
    each = rows // count
    part = tensor.detach().narrow(0, mesh.get_local_rank() * each, each)
    # Copied, since a view's storage offset differs from rank to rank, and Dynamo would trace other graphs for it.
    local = torch.empty_like(part, pin_memory=part.is_pinned()).copy_(part)
    return compat.make_dtensor(Rows, local, compat.dtensor_spec(mesh, (Shard(0),), tensor))


def rows_of_all(tensor: torch.Tensor, mesh: DeviceMesh) -> Rows:
    """Rows of a global tensor, made of each rank's own: all ranks have as many, of one shape and dtype. Without a copy where
    they lie one after the other at the start of their storage."""
    local = tensor.detach()
    if not local.is_contiguous() or local.storage_offset():
        local = local.clone(memory_format=torch.contiguous_format)
    shape = (tensor.shape[0] * mesh.size(), *tensor.shape[1:])
    like = torch.empty_strided(shape, local.stride(), dtype=tensor.dtype, device="meta")
    return compat.make_dtensor(Rows, local, compat.dtensor_spec(mesh, (Shard(0),), like))


def _gathered(value: torch.Tensor) -> torch.Tensor:
    return whole(value) if isinstance(value, Rows) else value
