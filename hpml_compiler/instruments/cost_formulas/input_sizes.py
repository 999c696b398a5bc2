"""Find the batch and sequence dims of a batch, and resize it."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes import compat
from passes.errors import BadInput

BATCH, SEQUENCE = "batch", "sequence"


@dataclass(frozen=True)
class VariedInputs:
    """A batch whose `sizes` (name -> size) can be changed. places: name -> (leaf index, dim) with that size."""

    batch: Any
    sizes: dict[str, int]
    places: dict[str, tuple[tuple[int, int], ...]]

    def at(self, sizes: Mapping[str, int]) -> Any:
        """The batch with other sizes; CPU tensors that change are made on the meta device, which takes no memory."""
        leaves, spec = compat.pytree.tree_flatten(self.batch)
        shapes = {k: list(x.shape) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        changed = set()
        for name, size in sizes.items():
            for leaf, dim in self.places[name]:
                shapes[leaf][dim] = size
                changed.add(leaf)
        for k in changed:
            device = "meta" if leaves[k].device.type == "cpu" else leaves[k].device
            leaves[k] = torch.zeros(shapes[k], dtype=leaves[k].dtype, device=device)
        return compat.pytree.tree_unflatten(leaves, spec)

    def without(self, name: str) -> VariedInputs:
        """The same batch with that size fixed."""
        return VariedInputs(self.batch, {n: s for n, s in self.sizes.items() if n != name},
                            {n: p for n, p in self.places.items() if n != name})


def varied_inputs(batch: Any, dims: Mapping[str, int] | None = None) -> VariedInputs:
    """Find the dims of a batch that become symbols of formulas.

    dims: name -> size: all dims of that size are varied together. By default `batch` is dim 0 of the first tensor, and of
    all others with as many rows; `sequence` is dim 1 of the first tensor of tokens (integers, two dims or more), else of the
    first float tensor with three dims, and all other dims of that size except rows and features. Raises BadInput if two
    names have the same size, or no tensor has a given size.
    """
    leaves = [(k, x) for k, x in enumerate(compat.pytree.tree_leaves(batch)) if isinstance(x, torch.Tensor) and x.ndim]
    if not leaves:
        raise BadInput("the batch has no tensor with a dim", "batch", "give the model's inputs as a tuple or dict")
    return _given(batch, leaves, dims) if dims is not None else _found(batch, leaves)


def _given(batch: Any, leaves: Sequence[tuple[int, torch.Tensor]], dims: Mapping[str, int]) -> VariedInputs:
    if len(set(dims.values())) < len(dims):
        raise BadInput(f"two names have one size: {dict(dims)}", "dims", "trace a batch in which the sizes differ")
    places = {}
    for name, size in dims.items():
        places[name] = tuple((k, d) for k, x in leaves for d, n in enumerate(x.shape) if n == size)
        if not places[name]:
            raise BadInput(f"no input has a dim of size {size} for {name!r}", "dims",
                           f"the inputs are {', '.join(str(list(x.shape)) for _, x in leaves)}")
    return VariedInputs(batch, dict(dims), places)


def _found(batch: Any, leaves: Sequence[tuple[int, torch.Tensor]]) -> VariedInputs:
    rows = leaves[0][1].shape[0]
    places = {BATCH: tuple((k, 0) for k, x in leaves if x.shape[0] == rows)}
    sizes = {BATCH: rows}
    tokens = [x for _, x in leaves if not x.is_floating_point() and x.ndim >= 2]
    signals = [x for _, x in leaves if x.is_floating_point() and x.ndim == 3]
    if tokens or signals:
        length = (tokens or signals)[0].shape[1]
        long = tuple((k, d) for k, x in leaves for d in _length_dims(x, length, rows))
        if length > 1 and long:
            sizes[SEQUENCE], places[SEQUENCE] = length, long
    return VariedInputs(batch, sizes, places)


def _length_dims(x: torch.Tensor, length: int, rows: int) -> list[int]:
    """Dims with the sequence's length, except rows and the features of float tensors: the last dim, unless the one before has
    the same length (a mask)."""
    first = 1 if x.shape[0] == rows else 0
    dims = [d for d in range(first, x.ndim) if x.shape[d] == length]
    last = x.ndim - 1
    if x.is_floating_point() and last in dims and last - 1 not in dims:
        dims.remove(last)
    return dims
