"""SyncBatchNorm in models compiled with hpml: runs as BatchNorm, whose statistics are those of the global batch already.

torch's SyncBatchNorm gathers statistics from all ranks. In a model compiled with hpml each rank sees the global batch, so
every row would be counted once per rank; on CPU torch does not support it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes import compat
from passes.errors import BadInput

GLOBAL = "_hpml_global_batch"
"""Attribute of layers that run as BatchNorm; copies of a layer have it, too."""


def use_global_batch(name: str, layer: nn.SyncBatchNorm) -> None:
    """Run a SyncBatchNorm layer as BatchNorm. name: of the layer in its model. Raises BadInput if the layer's process group
    does not have all ranks."""
    group = layer.process_group
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise BadInput("SyncBatchNorm is given a process group that has not all ranks: in a model that hpml splits, statistics "
                       "are those of the global batch", f"`{name}`", "leave process_group out, or use nn.GroupNorm")
    _watch_layers()
    setattr(layer, GLOBAL, True)


@functools.cache
def _watch_layers() -> None:
    compat.replace_for_good({"SyncBatchNorm.forward": _by_mark})


def _by_mark(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> Any:
        if getattr(self, GLOBAL, False):
            return nn.BatchNorm1d.forward(self, input)  # type: ignore[arg-type]  # the forward of all BatchNorms
        return original(self, input)

    return forward
