"""Batch tensors that are sharded by rows: each rank stores its own rows, and the script sees the whole tensor."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from hpml_compiler.runtime.dtensor.dispatch_table import KEEPS_ROWS, MEMORY, METADATA
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.dtensor.local_dispatch import wrap
from hpml_compiler.runtime.dtensor.op_dispatch import (
    GatheredArguments,
    changed_tensors,
    gathered_value,
    map_tensors,
    on_fakes,
    run_gathered,
    shares_memory,
    tensors_in,
)
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, name_slots
from hpml_compiler.runtime.dtensor.script_collectives import MODULE, on_replicas
from hpml_compiler.runtime.placements.shard_and_gather import local_shard, to_full_tensor
from passes import compat


class BatchShard(PlacedTensor):
    """A batch tensor with placement `Shard(0)` over all ranks that behaves as the whole tensor.

    Moves, casts (`.to(device)`, `.float()`) and pointwise ops on batch shards alone stay sharded. In a compiled graph it is
    the whole tensor, and the plan decides which part each rank reads. Other ops gather it and return a plain tensor.
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "data":
            func, name = torch.Tensor.detach, "detach"  # unlike `.data`, writes to it count as changes
        elif name == "__get__" or name in METADATA | MEMORY:
            return super().__torch_function__(func, types, args, kwargs)
        if any(hasattr(kind, "record_of_calls") for kind in types):
            return NotImplemented  # that class records the call, or computes its operands
        if any(issubclass(kind, LazyOutput) for kind in types):
            return LazyOutput.__torch_function__(func, types, args, kwargs)
        with compat.plain_torch_functions():
            viewed = [operand for operand in tensors_in((args, kwargs)) if VIEWED in getattr(operand, "__dict__", ())]
            for operand in viewed:
                write_back_views(operand)
            if viewed and any(operand is target for operand in viewed for target in changed_tensors(name, args, kwargs)):
                return _on_whole(func, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        if type(result) is BatchShard and args and type(args[0]) is BatchShard and result is not args[0]:
            _share_views(result, args[0])
        return result

    @classmethod
    def _route(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if any(isinstance(t, DTensor) and compat.is_fake(t._local_tensor) for t in tensors_in((args, kwargs))):
            return on_fakes(func, args, kwargs)
        if getattr(func, "__module__", None) == MODULE:
            return on_replicas(func, args, kwargs, _whole_of)
        changed = changed_tensors(name, args, kwargs)
        if changed and isinstance(changed[0], DTensor) and not isinstance(changed[0], BatchShard):
            # a parameter, changed in place by a value that is a batch shard
            return PlacedTensor._route(func, name, map_tensors(_gathered, args), map_tensors(_gathered, kwargs))
        if name in KEEPS_ROWS and isinstance(first, BatchShard) and not any(isinstance(a, DTensor) for a in args[1:]):
            local = func(first._local_tensor, *args[1:], **kwargs)
            return first if local is first._local_tensor else wrap(local, cls, first._spec)
        return _on_whole(func, args, kwargs)

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        write_back_views(self)
        return super().full_tensor(**kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        write_back_views(self)
        return super().to_local(**kwargs)


name_slots(BatchShard)
VIEWED = "viewed"
"""Attribute with the `_Viewed` of a batch shard that the script has views of; shards in the same memory share it."""


class _Viewed:
    """The whole tensor that the script's views belong to, and its version when the shard was last equal to it."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.version = 0


def write_back_views(rows: Any) -> None:
    """Copy the script's writes to views (`x[:, 0].sub_(mean)`) back into this rank's rows.

    Writes by collectives, `.data` and NumPy do not increase the version counter; for these, tensors that autograd saved of
    the rows stay valid too.
    """
    viewed = vars(rows).get(VIEWED)
    if viewed is None or viewed.value is None:
        return
    counted = viewed.value._version != viewed.version
    local = rows._local_tensor if counted else rows._local_tensor.data
    local.copy_(local_shard(viewed.value.detach(), rows.device_mesh, rows.placements))
    viewed.version = viewed.value._version


def _share_views(made: BatchShard, source: BatchShard) -> None:
    """Let shards in the same memory (`x.detach()`) share their record of views."""
    if not compat.is_fake(source._local_tensor) and shares_memory(made._local_tensor, source._local_tensor):
        vars(made)[VIEWED] = vars(source).setdefault(VIEWED, _Viewed())


def _whole_of(tensor: DTensor) -> torch.Tensor:
    viewed = vars(tensor).get(VIEWED)
    return gathered_value(tensor) if viewed is None or viewed.value is None else viewed.value


def _on_whole(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the op on whole tensors. A whole tensor whose view is returned is saved, so that later views are of the same one."""
    wholes = GatheredArguments(_whole_of)
    result = run_gathered(func, args, kwargs, wholes=wholes)
    for tensor, value in wholes:
        if not isinstance(tensor, BatchShard) or value.is_inference():
            continue
        viewed = vars(tensor).get(VIEWED)
        if viewed is not None and viewed.value is value:
            viewed.version = value._version
        elif any(shares_memory(made, value) for made in tensors_in(result)):
            viewed = vars(tensor).setdefault(VIEWED, _Viewed())
            viewed.value, viewed.version = value, value._version
    return result


def shard_batch(tensor: torch.Tensor, mesh: DeviceMesh) -> BatchShard:
    """Copy this rank's rows out of a whole tensor that is equal on all ranks. The number of ranks must divide the rows."""
    count, rows = mesh.size(), tensor.shape[0]
    if rows % count:
        raise ValueError(f"{rows} rows cannot be divided among {count} ranks")
    each = rows // count
    part = tensor.detach().narrow(0, mesh.get_local_rank() * each, each)
    # Copied, since a view's storage offset differs between ranks, and Dynamo would trace different graphs.
    local = torch.empty_like(part, pin_memory=part.is_pinned()).copy_(part)
    return compat.make_dtensor(BatchShard, local, compat.dtensor_spec(mesh, (Shard(0),), tensor))


def batch_of_all_ranks(tensor: torch.Tensor, mesh: DeviceMesh) -> BatchShard:
    """Global tensor whose shards are the ranks' own rows: the same shape and dtype on all ranks. Not copied where `tensor` is
    contiguous with storage offset 0."""
    local = tensor.detach()
    if not local.is_contiguous() or local.storage_offset():
        local = local.clone(memory_format=torch.contiguous_format)
    shape = (tensor.shape[0] * mesh.size(), *tensor.shape[1:])
    like = torch.empty_strided(shape, local.stride(), dtype=tensor.dtype, device="meta")
    return compat.make_dtensor(BatchShard, local, compat.dtensor_spec(mesh, (Shard(0),), like))


def _gathered(value: torch.Tensor) -> torch.Tensor:
    return to_full_tensor(value) if isinstance(value, BatchShard) else value
