"""Run pointwise ops and norms on local parts, for tensors of one placement."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.runtime.dtensor.dispatch_table import in_place
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from passes import compat
from passes.session_state import state_of

WITHOUT_PARTIAL = (Shard, Replicate, SingleRank, InnerShard)
"""Placements without a pending reduction."""


def try_local(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the op on local parts if they are enough, else return NotImplemented.

    The op is one of `dispatch_table.ON_LOCALS`. Local parts are enough if autograd records nothing, and all
    operands have one shape and placement without Partial, or no dims; of foreach ops, index by index.
    """
    if name == "_foreach_norm":
        return _try_norms(func, *args, **kwargs)
    if name.startswith("_f"):
        return _try_lists(func, name, args, kwargs)
    if name == "to":
        if not isinstance(args[0], DTensor):  # a plain target that would be made like a placed one
            return NotImplemented
        local = func(args[0]._local_tensor, *args[1:], **kwargs)
        return args[0] if local is args[0]._local_tensor else NotImplemented
    operands = _Operands(torch.is_grad_enabled())
    local_args = [operands.local(value) if isinstance(value, torch.Tensor) else value for value in args]
    if kwargs:
        kwargs = {key: operands.local(value) if isinstance(value, torch.Tensor) else value
                  for key, value in kwargs.items()}
    if operands.misfit:
        return NotImplemented
    result = func(*local_args, **kwargs)
    return args[0] if in_place(name) else operands.wrap(result)


def _try_norms(func: Callable[..., Any], tensors: Any, order: Any = 2, *rest: Any, **kwargs: Any) -> Any:
    """`_foreach_norm`: norms of local parts, marked so that a reduction combines them to the full norms."""
    fits = all(isinstance(tensor, DTensor) and not (tensor.requires_grad and torch.is_grad_enabled())
               and all(type(placement) in WITHOUT_PARTIAL for placement in tensor._spec.placements)
               for tensor in tensors)
    if not fits or rest or kwargs or not isinstance(order, (int, float)) or not 0 < order < math.inf:
        return NotImplemented
    norms = func([tensor._local_tensor for tensor in tensors], order)
    return tuple(compat.make_dtensor(type(tensor), norm, _norm_spec(tensor._spec.mesh, tensor._spec.placements, order,
                                                                    norm.dtype))
                 for tensor, norm in zip(tensors, norms, strict=True))


class _NormSpecs(dict[tuple, Any]):
    """Specs of the norms of local parts, by the arguments of `_norm_spec`."""


def _norm_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], order: float, dtype: torch.dtype) -> Any:
    specs, key = state_of(_NormSpecs), (mesh, placements, order, dtype)
    if (known := specs.get(key)) is not None:
        return known
    partial = [placement if type(placement) is Replicate else compat.norm_partial(order) for placement in placements]
    return specs.setdefault(key, compat.dtensor_spec(mesh, partial, torch.empty((), dtype=dtype, device="meta")))


def _try_lists(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    length = max((len(value) for value in values if isinstance(value, (list, tuple))), default=0)
    tracked = torch.is_grad_enabled()
    columns, scalars = [_Operands(tracked) for _ in range(length)], _Operands(tracked)

    def local(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return scalars.local(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [column.local(item) for column, item in zip(columns, value, strict=True)]
        return value

    local_args, local_kwargs = [local(value) for value in args], {key: local(value) for key, value in kwargs.items()}
    if scalars.misfit or scalars.spec is not None or any(column.misfit for column in columns):
        return NotImplemented
    results = func(*local_args, **local_kwargs)
    if in_place(name):
        return None if results is None else args[0]
    wrapped = tuple(column.wrap(result) for column, result in zip(columns, results, strict=True))
    return NotImplemented if any(result is NotImplemented for result in wrapped) else wrapped


class _Operands:
    """Operands of a pointwise op, and the placement they share."""

    __slots__ = ("kind", "misfit", "scalar_spec", "spec", "stride", "tracked")

    def __init__(self, tracked: bool) -> None:
        self.tracked = tracked
        self.misfit = False
        self.spec: Any = None
        self.scalar_spec: Any = None

    def local(self, tensor: Any) -> torch.Tensor:
        """Local part of one more operand; notes whether its placement matches."""
        if self.tracked and tensor.requires_grad:
            self.misfit = True
        elif not isinstance(tensor, DTensor):
            self.misfit = self.misfit or tensor.dim() > 0
        else:
            local, spec = tensor._local_tensor, tensor._spec
            if spec is not self.spec and not self._fits(tensor, spec, local):
                self.misfit = True
            return local
        return tensor

    def _fits(self, tensor: DTensor, spec: Any, local: torch.Tensor) -> bool:
        if compat.is_fake(local) or any(type(placement) not in WITHOUT_PARTIAL for placement in spec.placements):
            return False
        if not spec.tensor_meta.shape:
            if self.scalar_spec is None:
                self.scalar_spec = spec
                if self.spec is None:
                    self.kind = type(tensor)
            return True
        ours = self.spec
        if ours is None:
            self.spec, self.kind, self.stride = spec, type(tensor), local.stride()
            return True
        return (spec.placements == ours.placements and spec.tensor_meta.shape == ours.tensor_meta.shape
                and spec.mesh == ours.mesh)

    def wrap(self, local: torch.Tensor) -> Any:
        """Wrap a new tensor in the shared placement; NotImplemented if its strides are in another order."""
        spec = self.spec or self.scalar_spec
        if spec is None:
            return local
        if self.spec is not None and local.stride() != self.stride:
            return NotImplemented
        return wrap(local, self.kind, spec)


def wrap(local: torch.Tensor, kind: type, spec: Any) -> Any:
    """Wrap a local tensor in this class, placement and full shape, with the dtype of the local tensor."""
    if local.dtype != spec.tensor_meta.dtype:
        meta = spec.tensor_meta
        like = torch.empty_strided(meta.shape, meta.stride, dtype=local.dtype, device="meta")
        spec = compat.dtensor_spec(spec.mesh, spec.placements, like)
    return compat.make_dtensor(kind, local, spec)
