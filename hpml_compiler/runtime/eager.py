"""The ways to run one op on placed tensors, outside compiled graphs."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from hpml_compiler.runtime.routes import in_place
from hpml_compiler.runtime.whole import local_part, reduced, whole

log = logging.getLogger(__name__)
VIEW_STEP = "view_step"
"""Attribute of a gathered view: how it was made."""


def on_whole(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The op on whole plain tensors, as one device does it."""
    return func(*_map(whole, args), **_map(whole, kwargs))


@dataclass(frozen=True)
class ViewStep:
    """How a view was made of another tensor: `func(source, *args, **kwargs)`, of which it is item `index`, if any."""

    source: DTensor
    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    index: int | None

    def replay(self, whole_source: torch.Tensor) -> torch.Tensor:
        """The same view of the whole source."""
        result = self.func(whole_source, *self.args, **self.kwargs)
        return result if self.index is None else result[self.index]


def through_whole(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change a whole copy of the tensor that the op writes to, and keep this rank's part of it.

    If that tensor is a gathered view, what it views is changed too.
    """
    target = changed_tensor(name, args, kwargs)
    if torch.is_grad_enabled() and target.requires_grad:
        raise RuntimeError(f"{name} changes a tensor in place that requires a gradient; use torch.no_grad()")
    base, steps = target, []
    while hasattr(base, VIEW_STEP):
        steps.append(getattr(base, VIEW_STEP))
        base = steps[-1].source
    with torch.no_grad():
        whole_base = value = whole(base).clone()
        for step in reversed(steps):
            value = step.replay(value)

        def operand(tensor: torch.Tensor) -> torch.Tensor:
            return value if tensor is target else whole(tensor)

        func(*_map(operand, args), **_map(operand, kwargs))
        for changed, new in ((base, whole_base), (target, value)):
            _keep_part(changed, new)
    return target


def _keep_part(tensor: DTensor, value: torch.Tensor) -> None:
    """Give the tensor a whole new value; it keeps its placement, but what was still to be reduced is reduced now."""
    tensor._local_tensor.copy_(local_part(value, tensor.device_mesh, tensor.placements))
    tensor._spec = reduced(tensor._spec, value)


def as_dtensors(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any], mesh: DeviceMesh,
                kind: type) -> Any:
    """The op on DTensors, plain tensors being the same on all ranks; what DTensor refuses is done whole.

    DTensors in the result become `kind`, a subclass.
    """

    def replicated(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.dim():  # DTensor itself takes plain scalars
            return tensor
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)

    try:
        return adopt(func(*_map(replicated, args), **_map(replicated, kwargs)), kind)
    except dist.DistError:
        raise
    except Exception as refusal:
        log.debug("%s is done on whole tensors, since DTensor says: %s", name, refusal)
        if isinstance(changed_tensor(name, args, kwargs), DTensor):
            return through_whole(func, name, args, kwargs)
        return on_whole(func, args, kwargs)


def adopt(value: Any, kind: type) -> Any:
    """DTensors in a result become the subclass, so that they too may meet plain tensors."""
    if type(value) is DTensor:
        value.__class__ = kind
    elif isinstance(value, (list, tuple)):
        for item in value:
            adopt(item, kind)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def changed_tensor(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The tensor that the op writes to, the first of a list; None if it makes a new one."""
    first = args[0] if args else next(iter(kwargs.values()), None)  # torch.nn.init names all its arguments
    target = first if in_place(name) else kwargs.get("out")
    return target[0] if isinstance(target, (list, tuple)) and target else target


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, list):  # Dynamo gives lists of a class of its own, which cannot be changed
        return [_map(function, item) for item in value]
    if type(value) is tuple:
        return tuple(_map(function, item) for item in value)
    return value
