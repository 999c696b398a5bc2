"""The state of a model that is split, whole, for one file that a script on one device can load."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.together import together
from hpml_compiler.runtime.whole import whole
from passes.graph.nodes import memory_of

CALLED_BY_ONE = "all ranks call it, outside of `if rank == 0:`; rank 0 alone gets the state, and saves it"


def full_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The whole state on rank 0, as plain tensors in CPU memory; `{}` on the other ranks. All ranks must call it.

    Of a model alone it is what `model.state_dict()` is on one device (the names are those of the model itself, also if
    `model` is what `torch.compile` returned). With an optimizer it is `{"model": ..., "optimizer": ...}`. Tensors are
    gathered one after the other, so a rank never holds more than one whole tensor beyond its own parts, and rank 0 those
    of the result. Nothing in it shares memory with the model.
    """
    together("hpml_compiler.full_state_dict", CALLED_BY_ONE, every=0)
    model = getattr(model, "_orig_mod", model)
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    copies = _Copies(keeps)
    with torch.no_grad():
        state = copies.of(model.state_dict())
        if optimizer is not None:
            state = {"model": state, "optimizer": copies.of(optimizer.state_dict())}
    return state if keeps else {}


class _Copies:
    """Whole CPU copies. What shares memory in the model, as tied weights do, shares it in the copies."""

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._made: dict[tuple, torch.Tensor] = {}

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
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        key = (memory_of(local), local.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, local.device)
        has_memory = local.numel() or isinstance(tensor, DTensor)  # also where another rank has the rows
        if local.layout == torch.strided and has_memory and key in self._made:
            return self._made[key]
        gathered = whole(tensor)
        if not self._keeps:
            return None
        copy = self._made[key] = gathered.to("cpu", copy=True)
        return copy
