"""Resident memory of this rank: bytes of parameters, gradients and optimizer state."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hpml_compiler.runtime.dtensor.op_dispatch import tensors_in
from passes import compat


def local(value: Any) -> Any:
    """This rank's part of a placed tensor; any other value itself."""
    return getattr(value, "_local_tensor", value)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_bytes(optimizers: Iterable[torch.optim.Optimizer], others: Iterable[torch.Tensor] = ()) -> dict[str, int]:
    """Bytes of these optimizers' "parameters", "gradients" and "optimizer" state. others: further parameters, such as frozen
    ones."""
    optimizers = list(optimizers)
    with compat.plain_torch_functions():
        parameters = [*trained_parameters(optimizers), *others]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [tensor for optimizer in optimizers for kept in optimizer.state.values() for tensor in tensors_in(kept)]
        return {"parameters": storage_bytes(parameters), "gradients": storage_bytes(gradients),
                "optimizer": storage_bytes(state)}


def trained_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


class OldGradients:
    """The current gradients of parameters, tracked until they are replaced or freed.

    They are tracked by an attribute. (A weak reference would prevent `model.to(...)` from swapping them, and addresses are
    reused.)
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._mark = object()
        with compat.plain_torch_functions():
            self._found = [p for p in parameters if p.grad is not None]
            for parameter in self._found:
                setattr(parameter.grad, _MARK, self._mark)

    def bytes_left(self) -> int:
        """Bytes of the tracked tensors that are still the parameters' gradients."""
        with compat.plain_torch_functions():
            gradients = (p.grad for p in self._found)
            return storage_bytes(g for g in gradients if g is not None and getattr(g, _MARK, None) is self._mark)


_MARK = "hpml_old_gradient"
