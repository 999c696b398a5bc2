"""`torch.func` on models with placed parameters: per-sample gradients, Jacobians, Hessian-vector products."""
from __future__ import annotations

import functools
from typing import Any

import torch

from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.outputs.recorded_output import value_of
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from passes import compat


@functools.cache
def watch_transforms() -> None:
    """Gather placed tensors before `torch.func` differentiates with respect to them, and lazy outputs before vmap."""
    compat.convert_before_differentiating(_plain)
    compat.convert_before_vmap(_plain_output)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = value_of(tensor)
    if not isinstance(tensor, PlacedTensor):
        return tensor
    if torch.compiler.is_compiling():
        compat.break_graph("torch.func differentiates by parameters that hpml has sharded, which cannot be compiled; "
                           "call it outside of the compiled function, or remove fullgraph=True")
    return to_full_tensor(tensor)


def _plain_output(value: Any) -> Any:
    value = value_of(value)
    return value.used() if isinstance(value, LazyOutput) else value
