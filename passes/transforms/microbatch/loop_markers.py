"""Marker ops at the begin and end of a graph's microbatch loop; `passes.transforms.microbatch.loop_split` splits the graph
there.

    take(x)         this microbatch's rows of x; in the loop
    again(x)        all of x; what is computed from it is computed in the loop, for each microbatch
    put_together(x) concatenated rows of all microbatches; after the loop
    add_up(x)       the sum over all microbatches; after the loop

Sizes define the rows: `apart` is the shape of the whole tensor with an additional dim `dim` that numbers the microbatches. The
markers are never run: the runtime of the loop slices and accumulates.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

torch.library.define("hpml::take", "(Tensor x, int[] apart, int dim, int[] size) -> Tensor")
torch.library.define("hpml::again", "(Tensor x) -> Tensor")
torch.library.define("hpml::put_together", "(Tensor x, int[] apart, int dim, int[] size) -> Tensor")
torch.library.define("hpml::add_up", "(Tensor x) -> Tensor")

TAKE = torch.ops.hpml.take.default
AGAIN = torch.ops.hpml.again.default
PUT_TOGETHER = torch.ops.hpml.put_together.default
ADD_UP = torch.ops.hpml.add_up.default
ENTERS, COLLECTS = (TAKE, AGAIN), (PUT_TOGETHER, ADD_UP)


def taken(x: torch.Tensor, apart: Sequence[int], dim: int, size: Sequence[int], number: int) -> torch.Tensor:
    """The rows of microbatch `number`: a view, where strides allow it."""
    return x.reshape(apart).select(dim, number).reshape(size)


def place_of(whole: torch.Tensor, apart: Sequence[int], dim: int, number: int) -> torch.Tensor:
    """The view of a packed tensor that the rows of microbatch `number` are written to."""
    return whole.view(apart).select(dim, number)


@torch.library.register_fake("hpml::take")
def _fake_take(x: torch.Tensor, apart: Sequence[int], dim: int, size: Sequence[int]) -> torch.Tensor:
    part = taken(x, apart, dim, size, 0)
    return torch.empty_strided(part.shape, part.stride(), dtype=x.dtype, device=x.device)


@torch.library.register_fake("hpml::put_together")
def _fake_put_together(x: torch.Tensor, apart: Sequence[int], dim: int, size: Sequence[int]) -> torch.Tensor:
    return x.new_empty(size)


@torch.library.register_fake("hpml::again")
@torch.library.register_fake("hpml::add_up")
def _fake_same(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.preserve_format)
