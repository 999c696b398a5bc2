"""Values that a script logs, such as its loss: kept as they were, and read from the device when it has computed them."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from passes import compat
from passes.errors import BadInput

CALLED = "Monitor.log"


class ScriptValues:
    """The latest values by name. Nothing waits for a device: a tensor is copied there, and on its way to the host while
    training goes on."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._latest[name] = _kept(name, value)

    def take(self) -> ValuesOnTheWay:
        """The values since the last `take`, on their way to the host."""
        latest, self._latest = self._latest, {}
        return ValuesOnTheWay(latest)


class ValuesOnTheWay:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: _to_host(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        self._arrived: Any = None
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values.values()):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def is_here(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def read(self) -> dict[str, float]:
        """The values as numbers; waits for them if they are not here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return {name: float(value) for name, value in self._values.items()}


def _to_host(value: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda:
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _kept(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise BadInput(f"{name} is a tensor of shape {list(value.shape)}, not one number", CALLED,
                           f"log a number, such as {name}.mean()")
        made: Any = value if type(value) in (torch.Tensor, torch.nn.Parameter) else vars(value).get("value")
        if made is None:  # placed, or not computed yet: read as `item()` does, on all ranks together
            return float(value)
        with compat.plain_torch_functions(), torch.no_grad():
            return made.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name} is {value!r:.40}, not a number", CALLED, "log numbers and tensors of one element") from error


def finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
