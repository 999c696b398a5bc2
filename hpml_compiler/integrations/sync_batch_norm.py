"""SyncBatchNorm in a model that hpml splits: BatchNorm, whose statistics are those of the global batch already.

torch's own gathers statistics from all ranks. Each rank of a split model computes with the global batch, so that would count
every row once per rank; on CPU torch refuses it.
"""
from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes.errors import BadInput

GLOBAL = "_hpml_global_batch"
"""Attribute of layers that have been told; copies of a layer have it, too."""


def use_global_batch(name: str, layer: nn.SyncBatchNorm) -> None:
    """name: where the layer is in its model. Raises BadInput if its statistics are to be those of a part of the ranks."""
    group = layer.process_group
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise BadInput("SyncBatchNorm is given a process group that has not all ranks: in a model that hpml splits, statistics "
                       "are those of the global batch", f"`{name}`", "leave process_group out, or use nn.GroupNorm")
    _watch()
    setattr(layer, GLOBAL, True)


@functools.cache
def _watch() -> None:
    original = nn.SyncBatchNorm.forward

    @functools.wraps(original)
    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> Any:
        if getattr(self, GLOBAL, False):
            return nn.BatchNorm1d.forward(self, input)  # type: ignore[arg-type]  # that of all BatchNorms
        return original(self, input)

    nn.SyncBatchNorm.forward = forward
