"""Bytes of the tensors that live from step to step: parameters, gradients and optimizer state, this rank's parts."""
from __future__ import annotations

from collections.abc import Iterable

import torch

from hpml_compiler.runtime.dtensor.op_dispatch import tensors_in
from passes import compat


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this rank's part of a placed one."""
    return getattr(tensor, "_local_tensor", tensor)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind them, each counted once."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_bytes(optimizers: Iterable[torch.optim.Optimizer], others: Iterable[torch.Tensor] = ()) -> dict[str, int]:
    """Bytes by part ("parameters", "gradients", "optimizer") of what these optimizers update and keep. others: more
    parameters, such as frozen ones."""
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
    """The gradients that are there now, watched until they are replaced or dropped.

    They are marked. (A weak reference would keep `model.to(...)` from swapping them, and addresses are used again.)
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._mark = object()
        with compat.plain_torch_functions():
            self._found = [p for p in parameters if p.grad is not None]
            for parameter in self._found:
                setattr(parameter.grad, _MARK, self._mark)

    def bytes_left(self) -> int:
        """Bytes of those that are still gradients."""
        with compat.plain_torch_functions():
            gradients = (p.grad for p in self._found)
            return storage_bytes(g for g in gradients if g is not None and getattr(g, _MARK, None) is self._mark)


_MARK = "hpml_old_gradient"
