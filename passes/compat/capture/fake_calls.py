"""Calls of torch functions on fakes: the shapes of their results, and whether a compiled graph may make such a call later."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.compat.execution.dtensor_internals import plain_torch_functions

__all__ = ["DispatchMode", "FakeCalls", "dispatch_is_watched", "storage_key"]

DispatchMode = TorchDispatchMode
"""Base of modes that see every operator that runs."""


def dispatch_is_watched() -> bool:
    """True while a mode of this thread sees every operator that runs, such as a counter of FLOPs or a fake mode."""
    return torch._C._len_torch_dispatch_stack() > 0


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory: equal for its views."""
    return tensor.untyped_storage()._cdata


class _Watch(TorchDispatchMode):
    """Notes operators that draw random numbers, and the memory that others write to."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            named = {described.name: given for described, given in zip(func._schema.arguments, args, strict=False)}
            named |= kwargs or {}  # such as `out`
            written = [named.get(x.name) for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
            self.written.update(storage_key(x) for x in tree_leaves(written) if isinstance(x, torch.Tensor))
        return func(*args, **kwargs or {})


class FakeCalls:
    """Fakes of a sequence of calls, of fixed shapes."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake that is a leaf, of the same shape, strides, dtype and device."""
        with plain_torch_functions(), self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return made.requires_grad_(tensor.requires_grad)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[torch.Tensor],
             ) -> Any:
        """The result on fakes. NotImplemented where the call depends on values, draws random numbers or writes to one of the
        operands, or raises an error, which it will raise again on values."""
        watch = _Watch()
        try:
            with plain_torch_functions(), self._mode, watch:
                result = func(*args, **kwargs)
        except Exception:
            return NotImplemented
        written = watch.written & {storage_key(x) for x in operands}
        return NotImplemented if watch.random or written else result
