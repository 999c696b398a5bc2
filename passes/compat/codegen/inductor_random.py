"""Inductor's lowering of random numbers at given positions; otherwise as its own lowering of random numbers."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.ir import Pointwise
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import ops

from passes.compat.codegen.random_at import POSITIONS, RANDOM_AT


@register_lowering(POSITIONS, type_promotion_kind=None)
def _lower_positions(size: int, step: int, *, dtype: torch.dtype, device: torch.device) -> Any:
    return lowerings[torch.ops.prims.iota.default](
        size, start=0, step=step, dtype=dtype, device=device, requires_grad=False)


@register_lowering(RANDOM_AT, type_promotion_kind=None)
def _lower_random_at(seed: Any, mode: str, positions: Sequence[Any]) -> Any:
    seed_of, places = seed.make_loader(), [x.make_loader() for x in positions]

    def number(index: Sequence[Any]) -> Any:
        terms = [place([i]) for place, i in zip(places, index, strict=True)]
        position = functools.reduce(ops.add, terms) if terms else ops.constant(0, torch.int32)
        return getattr(ops, mode)(seed_of([]), ops.to_dtype(position, torch.int32))

    drawn = Pointwise.create(device=seed.get_device(), dtype=torch.float32, inner_fn=number,
                             ranges=[x.get_size()[0] for x in positions])
    drawn.realize()
    return drawn
