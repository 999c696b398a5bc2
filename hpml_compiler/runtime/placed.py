"""PlacedTensor: a DTensor that code written for one device may use as the whole tensor it stands for."""
from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from hpml_compiler.runtime import foreach, local_ops
from hpml_compiler.runtime.routes import COMPUTED_ATTRIBUTES, METADATA, NEEDS_WHOLE, ON_LOCALS, in_place
from hpml_compiler.runtime.whole import local_part, whole
from passes import compat

log = logging.getLogger(__name__)


class PlacedTensor(DTensor):
    """A DTensor that mixes with plain tensors.

    What parameters, their gradients and optimizer state are while a model is split. To a DTensor it adds that a
    script need not know: where it meets plain tensors it acts as the whole tensor, in both directions.

    - Traced by Dynamo, it is the whole tensor in every op, so recompiled graphs look like the first.
    - Changed in place (`p.copy_(plain)`, `p[0] = 0`), it keeps its placement and takes its part of what is written.
    - In ops with plain tensors of at least one dim, it is gathered, differentiably.
    - Among DTensors it is a DTensor; an op that DTensor refuses is done whole. Pointwise ops without autograd, on equal
      placements, run on the local parts directly, which is several times faster: what optimizers do.
    - Pickled, it is the whole tensor; copied by `copy.deepcopy`, it stays placed.

    As with every DTensor, all ranks must do the same, since some of this communicates.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        with compat.plain_torch_functions():
            if name == "__get__" and func.__self__.__name__ not in COMPUTED_ATTRIBUTES:
                return adopt(func(*args), PlacedTensor)  # the engine itself makes `.grad` a DTensor
            kwargs = kwargs or {}
            if name in ON_LOCALS:  # optimizers call thousands of these, so nothing else is looked at before
                result = local_ops.try_local(func, name, args, kwargs)
                if result is not NotImplemented:
                    return result
            elif name in METADATA:
                return func(*args, **kwargs)
            elif name == "__set__":
                return _set_attribute(func, *args)
            return cls._route(func, name, args, kwargs)

    @classmethod
    def _route(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        operands = tensors_in((args, kwargs))
        placed = [operand for operand in operands if isinstance(operand, DTensor)]
        if not placed:
            return func(*args, **kwargs)
        target = changed_tensor(name, args, kwargs)
        writes = isinstance(target, DTensor)
        if compat.is_fake(placed[0]._local_tensor) and not writes:
            return on_whole(func, args, kwargs)
        if name in NEEDS_WHOLE:
            return through_whole(func, name, args, kwargs) if writes else on_whole(func, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return foreach.unscale(func, *args, **kwargs)
        plain = any(operand.dim() and not isinstance(operand, DTensor) for operand in operands)
        if plain and foreach.is_foreach(name):
            return cls._route_by_kind(func, name, args, kwargs)
        if plain and not writes and name != "stack":
            return on_whole(func, args, kwargs)
        return as_dtensors(func, name, args, kwargs, placed[0].device_mesh)

    @classmethod
    def _route_by_kind(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        groups = foreach.split_by_kind(name, args, kwargs)
        if all(groups):
            return foreach.merge([
                (indices, cls._route(func, name, tuple(foreach.at(indices, value) for value in args),
                                     {key: foreach.at(indices, value) for key, value in kwargs.items()}))
                for indices in groups
            ])
        if groups[1]:
            return on_whole(func, args, kwargs)
        placed_args, placed_kwargs = foreach.like_targets(place_like, args, kwargs)
        result = local_ops.try_local(func, name, tuple(placed_args), placed_kwargs)
        return adopt(func(*placed_args, **placed_kwargs), PlacedTensor) if result is NotImplemented else result

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        return adopt(DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride), cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedTensor:
        if id(self) in memo:
            return memo[id(self)]
        with compat.plain_torch_functions():
            if not self.is_leaf:
                raise RuntimeError("only tensors made by the user (leaves of the autograd graph) can be copied deeply; "
                                   "detach() it first")
            result = compat.make_dtensor(type(self), self._local_tensor.clone(), self._spec, self.requires_grad)
            memo[id(self)] = result
            result.__dict__.update(copy.deepcopy(self.__dict__, memo))
            if self.grad is not None:
                result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = whole(self.detach())
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


compat.adopt_foreach_type(PlacedTensor)


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> PlacedTensor:
    """A whole plain tensor, equal on all ranks, as a PlacedTensor: each rank keeps its part; no communication.

    Not differentiable. Where a rank's part is the whole, it is the same storage.
    """
    tensor = tensor.detach()
    spec = compat.dtensor_spec(mesh, placements, tensor)
    return compat.make_dtensor(PlacedTensor, local_part(tensor, mesh, placements), spec)


def place_like(tensor: torch.Tensor, other: DTensor) -> torch.Tensor:
    """A whole plain tensor placed as `other` is; a DTensor as it is."""
    return tensor if isinstance(tensor, DTensor) else place(tensor, other.device_mesh, other.placements)


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
    """The first tensor that the op writes to; None if it makes a new one."""
    target = kwargs.get("out") if not in_place(name) else args[0] if args else None
    return target[0] if isinstance(target, (list, tuple)) and target else target


def on_whole(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The op on whole plain tensors, as one device does it."""
    return func(*_map(whole, args), **_map(whole, kwargs))


def through_whole(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change a whole copy, and keep this rank's part of it."""
    target = changed_tensor(name, args, kwargs)
    if torch.is_grad_enabled() and target.requires_grad:
        raise RuntimeError(f"{name} changes a tensor in place that requires a gradient; use torch.no_grad()")
    with torch.no_grad():
        value = whole(target).clone()
        func(*_map(lambda tensor: value if tensor is target else whole(tensor), args),
             **_map(lambda tensor: value if tensor is target else whole(tensor), kwargs))
        target._local_tensor.copy_(local_part(value, target.device_mesh, target.placements))
    return target


def as_dtensors(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """The op on DTensors, plain tensors being the same on all ranks; what DTensor refuses is done whole."""

    def replicated(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.dim():  # DTensor itself takes plain scalars
            return tensor
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)

    try:
        return adopt(func(*_map(replicated, args), **_map(replicated, kwargs)), PlacedTensor)
    except dist.DistError:
        raise
    except Exception as refusal:
        log.debug("%s is done on whole tensors, since DTensor says: %s", name, refusal)
        if isinstance(changed_tensor(name, args, kwargs), DTensor):
            return through_whole(func, name, args, kwargs)
        return on_whole(func, args, kwargs)


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(function, item) for item in value)
    return value


def _set_attribute(func: Any, tensor: torch.Tensor, value: Any) -> None:
    """`p.grad = ...` and `p.data = ...` with a whole plain tensor keep this rank's part of it."""
    name = func.__self__.__name__
    if isinstance(tensor, PlacedTensor) and isinstance(value, torch.Tensor) and name in ("grad", "data"):
        if name == "data":
            if value.shape != tensor.shape:
                raise ValueError(f"a placed tensor keeps its shape: {tuple(tensor.shape)}, not {tuple(value.shape)}")
            tensor._local_tensor.data = local_part(whole(value.detach()), tensor.device_mesh, tensor.placements)
            return
        if value.shape == tensor.shape:
            value = place_like(value, tensor)
    func(tensor, value)
