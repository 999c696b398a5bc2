"""PlacedTensor: a DTensor that code written for one device may use as the whole tensor it stands for."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from hpml_compiler.runtime import foreach
from hpml_compiler.runtime.eager import (
    VIEW_STEP,
    ViewStep,
    adopt,
    as_dtensors,
    changed_tensor,
    on_whole,
    tensors_in,
    through_whole,
)
from hpml_compiler.runtime.local_ops import try_local
from hpml_compiler.runtime.routes import COMPUTED_ATTRIBUTES, DIFFERENTIABLE, METADATA, NEEDS_WHOLE, ON_LOCALS, VIEWS
from hpml_compiler.runtime.whole import local_part, whole
from passes import compat


class PlacedTensor(DTensor):
    """A DTensor that mixes with plain tensors.

    What parameters, their gradients and optimizer state are while a model is split. To a DTensor it adds that a
    script need not know: where it meets plain tensors it acts as the whole tensor, in both directions.

    - Traced by Dynamo, it is the whole tensor in every op, so recompiled graphs look like the first.
    - Changed in place (`p.copy_(plain)`, `p[0] = 0`), it keeps its placement and takes its part of what is written.
      So do its views.
    - In ops with plain tensors, it is gathered, differentiably. (Plain scalars that no gradient flows to do not count.)
    - Among DTensors it is a DTensor; an op that DTensor refuses is done whole. Pointwise ops without autograd, on equal
      placements, run on the local parts directly, which is several times faster.
    - Pickled, it is the whole tensor; copied by `copy.deepcopy`, it stays placed.

    As with every DTensor, all ranks must do the same, since some of this communicates.
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        with compat.plain_torch_functions():
            if name == "__get__" and getattr(func.__self__, "__name__", "") not in COMPUTED_ATTRIBUTES:
                return adopt(func(*args), PlacedTensor)  # the engine itself makes `.grad` a DTensor
            kwargs = kwargs or {}
            if name in ON_LOCALS:  # optimizers call thousands of these, so nothing else is looked at before
                result = try_local(func, name, args, kwargs)
                if result is not NotImplemented:
                    return result
            elif name in METADATA:
                return func(*args, **kwargs)
            elif name == "__set__":
                return _set_attribute(func, *args)
            return cls._route(func, name, args, kwargs)

    @classmethod
    def _route(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        module = getattr(func, "__module__", None)
        operands = tensors_in((args, kwargs))
        placed = [operand for operand in operands if isinstance(operand, DTensor)]
        if not placed or module == "torch.autograd":
            return func(*args, **kwargs)
        writes = isinstance(changed_tensor(name, args, kwargs), DTensor)
        if writes and (name in NEEDS_WHOLE or module == "torch.nn.init" or "out" in kwargs):
            return through_whole(func, name, args, kwargs)
        if not writes and (name in NEEDS_WHOLE or compat.is_fake(placed[0]._local_tensor)
                           or (name not in DIFFERENTIABLE and _tracked(placed))):
            return on_whole(func, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return foreach.unscale(func, *args, **kwargs)
        if name == "__iter__":
            return iter(_view(torch.Tensor.unbind, "unbind", args, kwargs))
        if name in VIEWS and placed[0] is args[0]:
            return _view(func, name, args, kwargs)
        plain = [operand for operand in operands if not isinstance(operand, DTensor)]
        if _tracked(plain) or any(operand.dim() for operand in plain):
            if foreach.is_foreach(name):
                return cls._route_by_kind(func, name, args, kwargs)
            if not writes and (_tracked(plain) or name != "stack"):  # stack: the norms of `clip_grad_norm_`
                return on_whole(func, args, kwargs)
        return as_dtensors(func, name, args, kwargs, placed[0].device_mesh, PlacedTensor)

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
        result = try_local(func, name, tuple(placed_args), placed_kwargs)
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


class GatheredView(PlacedTensor):
    """What is a view on one device, but was gathered here, such as one row where rows are sharded.

    Changed in place, it changes what it views. It is not refreshed when that is changed by others.
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if isinstance(changed_tensor(name, args, kwargs or {}), GatheredView):
            with compat.plain_torch_functions():
                return through_whole(func, name, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


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


def _tracked(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _view(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A view; what does not share the source's storage is a GatheredView of it."""
    source = args[0]
    result = as_dtensors(func, name, args, kwargs, source.device_mesh, PlacedTensor)
    if name == "__getitem__" and _copies(args[1]):
        return result

    def marked(view: Any, index: int | None = None) -> torch.Tensor:
        if not isinstance(view, DTensor):
            if view.requires_grad:
                return view
            view = place(view, source.device_mesh, [Replicate()] * source.device_mesh.ndim)
        ours, theirs = source._local_tensor.untyped_storage(), view._local_tensor.untyped_storage()
        if type(source) is GatheredView or ours.data_ptr() != theirs.data_ptr():
            view.__class__ = GatheredView
            setattr(view, VIEW_STEP, ViewStep(source, func, args[1:], kwargs, index))
        return view

    if isinstance(result, (list, tuple)):
        return type(result)(marked(view, index) for index, view in enumerate(result))
    return marked(result)


def _copies(index: Any) -> bool:
    """Whether indexing with it makes a copy on one device too."""
    if isinstance(index, tuple):
        return any(map(_copies, index))
    return not (index is None or index is Ellipsis or isinstance(index, slice) or type(index) is int)


def _set_attribute(func: Any, tensor: torch.Tensor, value: Any) -> None:
    """`p.grad = ...` and `p.data = ...` with a whole plain tensor keep this rank's part of it."""
    name = func.__self__.__name__
    if isinstance(tensor, PlacedTensor) and isinstance(value, torch.Tensor) and name in ("grad", "data"):
        if value.shape != tensor.shape:
            raise ValueError(f"a placed tensor keeps its shape: {tuple(tensor.shape)}, not {tuple(value.shape)}")
        if name == "data":
            tensor._local_tensor.data = local_part(whole(value.detach()), tensor.device_mesh, tensor.placements)
            return
        value = place_like(value, tensor)
    func(tensor, value)
