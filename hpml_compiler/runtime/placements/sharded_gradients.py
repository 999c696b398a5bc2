"""Gradients with placements unknown to DTensor, accumulated by autograd's engine."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.placements.gather_parts import gathered_from_parts
from hpml_compiler.runtime.placements.single_rank_placement import unknown_to_dtensor
from passes import compat


def gradient_kind(kind: type, spec: Any) -> type:
    """Class of the gradients that autograd's engine gets for leaves of class `kind` with this spec."""
    return _added_by_parts(kind) if unknown_to_dtensor(spec.placements) else kind


@functools.cache
def _added_by_parts(kind: type) -> type:
    """Subclass whose tensors the engine adds part by part, since DTensor cannot add them. `.grad` itself has the leaf's
    class."""

    def dispatch(cls: type, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        spec = next(value._spec for value in args if isinstance(value, cls))
        if any(isinstance(value, DTensor) and value.placements != spec.placements for value in args):
            if func is not torch.ops.aten.add_.Tensor or not all(p.is_replicate() for p in args[0].placements):
                return NotImplemented
            # `.grad` is in the script's own memory, whole
            args[0]._local_tensor.add_(gathered_from_parts(args[1]._local_tensor, spec))
            return args[0]
        result = func(*[value._local_tensor if isinstance(value, DTensor) else value for value in args], **(kwargs or {}))
        if isinstance(args[0], DTensor) and result is args[0]._local_tensor:
            return args[0]  # changed in place
        if not isinstance(result, torch.Tensor):
            return result
        if func is torch.ops.aten.detach.default:  # becomes `.grad`
            return compat.make_dtensor(kind, result, spec)
        meta = spec.tensor_meta
        like = torch.empty_strided(meta.shape, meta.stride, dtype=result.dtype, device="meta")
        return compat.make_dtensor(cls, result, compat.dtensor_spec(spec.mesh, spec.placements, like))

    compat.enable_subclass_dispatch()
    return type("AddedByParts", (kind,), {"__slots__": (), "__torch_dispatch__": classmethod(dispatch)})
