"""Copies of this rank's parts of the tensors to save, in host memory, so that training goes on while they are written."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.process.world_group import this_rank
from passes import compat
from passes.errors import BadInput
from passes.graph.fx_nodes import memory_of


@dataclass
class StagedParts:
    """items: this rank's blocks as DCP's planner takes them. parts: their values. same: name of a tensor -> the name that its
    memory is saved under."""

    items: list[WriteItem]
    parts: dict[MetadataIndex, torch.Tensor]
    same: dict[str, str]

    @property
    def plan(self) -> SavePlan:
        return SavePlan(self.items)


def own_parts(tensors: Mapping[str, torch.Tensor]) -> StagedParts:
    """The blocks of these tensors that this rank has, not copied."""
    kept: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.layout is not torch.strided:
            raise BadInput(f"a tensor of layout {local.layout} cannot be saved", name, "make it dense")
        key = (memory_of(local), local.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        # Parts without rows share nothing that can be compared; tied parameters are one object, which all ranks can see.
        key = key if local.numel() else (id(tensor),)
        if key in seen:
            same[name] = seen[key]
        else:
            seen[key] = name
            kept[name] = tensor
    with compat.plain_torch_functions(), torch.no_grad():
        items = create_default_local_save_plan(dict(kept), this_rank() == 0).items
        parts = {item.index: _part(kept[item.index.fqn], item.index) for item in items}
    return StagedParts(items, parts, same)


def _part(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.__get_tensor_shard__(index).detach()
    return tensor.detach()


class StagingBuffers:
    """Host memory for the parts of the checkpoints in flight, reused, since fresh memory is paid page by page."""

    def __init__(self) -> None:
        self._free: list[dict[MetadataIndex, torch.Tensor]] = []

    def stage(self, tensors: Mapping[str, torch.Tensor], copy: bool) -> StagedParts:
        """The parts of these tensors. copy=False: those that are in host memory are not copied; nothing may change them."""
        own = own_parts(tensors)
        held = self._free.pop() if self._free and copy else {}
        staged, on_gpu = {}, False
        with compat.plain_torch_functions(), torch.no_grad():
            for index, part in own.parts.items():
                on_gpu |= part.is_cuda
                staged[index] = _copied(part, held.get(index)) if copy or part.is_cuda else part
            if on_gpu:
                torch.cuda.current_stream().synchronize()
        return StagedParts(own.items, staged, own.same)

    def give_back(self, staged: StagedParts) -> None:
        self._free.append(staged.parts)


def _copied(part: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
    if held is None or held.shape != part.shape or held.dtype != part.dtype:
        held = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return held.copy_(part, non_blocking=True)

