"""Gather whole tensors from the ranks' parts."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.placements.single_rank_placement import as_dtensor_knows
from passes import compat
from passes.graph.layouts import overlaps


def gathered_from_parts(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Gather the whole tensor from the ranks' parts; all ranks must call this together."""
    with compat.with_dispatch(), compat.plain_torch_functions():
        result = compat.make_dtensor(DTensor, *as_dtensor_knows(local, spec)).full_tensor()
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
    if result.stride() == stride:
        return result
    return in_memory_as(result, shape, stride)


def in_memory_as(packed: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Copy a tensor to memory with the given strides, which may overlap, as in an expanded tensor."""
    for dim in (dim for dim, step in enumerate(stride) if step == 0 and shape[dim] > 1):
        packed = packed.narrow(dim, 0, 1)
    length = offset + 1 + sum((size - 1) * step for size, step in zip(packed.shape, stride, strict=True))
    memory = packed.new_empty(max(length, 0))
    if overlaps(packed.shape, stride):
        places = torch.arange(length, device=packed.device).as_strided(packed.shape, stride, offset)
        memory.index_put_((places,), packed)
    else:
        memory.as_strided(packed.shape, stride, offset).copy_(packed)
    return memory.as_strided(shape, stride, offset)
