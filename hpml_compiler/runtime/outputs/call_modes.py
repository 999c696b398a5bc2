"""Modes in which a script calls functions on outputs, and questions about their operands."""
from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from passes import compat


class Modes:
    """Modes of this thread that change what a call does: gradients, autocast and the default dtype."""

    def __init__(self, device: str) -> None:
        self.gradients = torch.is_grad_enabled()
        self.autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                         for each in dict.fromkeys(("cpu", device))]
        self.key: Hashable = (self.gradients, *self.autocast, torch.get_default_dtype())

    @contextlib.contextmanager
    def again(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(compat.script_torch_functions())  # not where autograd.grad was called on placed tensors
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


def is_unread(tensor: torch.Tensor) -> bool:
    """True for an output of a compiled graph that is sharded and was not gathered."""
    if not isinstance(tensor, DTensor):
        return False
    shared = tensor.__dict__.get("shared")
    return shared is not None and shared.data is None


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
