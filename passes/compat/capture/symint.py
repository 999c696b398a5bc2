"""Symbolic sizes."""
from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def size_hint(size: int | torch.SymInt, unbacked: int) -> int:
    """A concrete number for a size at trace time, without adding a guard.

    unbacked: the result for a data-dependent size, which has no number.
    """
    if isinstance(size, int):
        return size
    from torch.fx.experimental import symbolic_shapes

    if hasattr(symbolic_shapes, "optimization_hint"):  # torch 2.13
        return int(symbolic_shapes.optimization_hint(size, fallback=unbacked))
    return int(symbolic_shapes.hint_int(size, fallback=unbacked))  # pyright: ignore[reportAttributeAccessIssue]


def depends_on_data(size: int | torch.SymInt) -> bool:
    """True for a data-dependent size, such as the length of `nonzero`."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def static_int(value: Any) -> int | None:
    """The value of a size or another integer of a traced graph if it is static; None if it may differ between calls."""
    if isinstance(value, torch.SymInt):
        return value.node.maybe_as_int()
    return value if isinstance(value, int) else None


def substitute_symbols(value: Any) -> Any:
    """A size, or a fake tensor, with symbols of static value replaced by their values; anything else unchanged."""
    if isinstance(value, torch.SymInt):
        number = static_int(value)
        return value if number is None else number
    if not isinstance(value, torch.Tensor) or not value._has_symbolic_sizes_strides:
        return value
    known = [static_int(size) for size in (*value.shape, *value.stride(), value.storage_offset())]
    sizes = [size for size in known if size is not None]
    if len(sizes) < len(known):
        return value
    with torch.no_grad():
        return value.as_strided(sizes[:value.ndim], sizes[value.ndim:-1], sizes[-1]).requires_grad_(value.requires_grad)


def ints_of_sizes(gm: torch.fx.GraphModule) -> list[torch.SymInt]:
    """The integers among the inputs of a Dynamo graph that sizes of its tensors depend on."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    sizes: set[Any] = set()
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("example_value")):
            if isinstance(value, torch.Tensor):
                sizes |= free_symbols((*value.shape, *value.stride()))
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    return [value for value in values if isinstance(value, torch.SymInt) and free_symbols(value) & sizes]
