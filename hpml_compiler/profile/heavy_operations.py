"""Benchmark calls for a model's heavy operations, on local shapes and this rank's device."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx

from hpml_compiler.profile.strategy_variants import StrategyVariant
from hpml_compiler.profile.timing import TimedCall, time_us
from passes import compat

SAMPLE_US = 400.0
"""Minimum duration of a sample: short calls are repeated."""


class CannotRun(Exception):
    """The operation does not run on these operands: its arguments contain sizes of the whole tensors."""


def operation_calls(found: Iterable[StrategyVariant]) -> tuple[dict[str, TimedCall], dict[str, str]]:
    """Timed calls of variants by key, and the errors of those that could not run, by key."""
    calls: dict[str, TimedCall] = {}
    failed: dict[str, str] = {}
    for variant in found:
        try:
            call = prepare(variant)
        except (CannotRun, RuntimeError, IndexError, TypeError) as error:
            failed[variant.key] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        us = time_us(call)
        if us < SAMPLE_US:  # else the sample is one call in any case
            us = min(us, time_us(call, 2))
        calls[variant.key] = TimedCall(call, repeats=max(1, round(SAMPLE_US / max(us, 1e-3))), warm=1)
    return calls, failed


def prepare(variant: StrategyVariant) -> Callable[[], Any]:
    """The operation on random operands of local shapes, with the traced operands' dim order in memory. Raises CannotRun."""
    node = variant.node
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(tensors) != len(variant.inputs):
        raise CannotRun("operands are not all tensors")
    limit = _index_limit(tensors, variant)
    local = {n: _operand(n.meta["val"], shape, limit) for n, shape in zip(tensors, variant.inputs)}
    wanted = [tuple(shape) for shape in variant.outputs]
    for sizes in ({}, _sizes(node, variant)):
        args, kwargs = compat.pytree.tree_map_only(
            fx.Node, lambda n: local.get(n, n), _with_sizes((node.args, dict(node.kwargs)), sizes))
        call = functools.partial(cast("Callable[..., Any]", node.target), *args, **kwargs)
        try:
            made = call()
        except RuntimeError:
            if not sizes:
                continue
            raise
        shapes = [tuple(t.shape) for t in compat.pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        if all(shape in shapes for shape in wanted):
            return call
    raise CannotRun("the result shapes differ from the plan's")


def _operand(traced: torch.Tensor, shape: Sequence[int], limit: int) -> torch.Tensor:
    order = sorted(range(traced.dim()), key=lambda d: (-traced.stride(d), d))
    back = [order.index(d) for d in range(traced.dim())]
    packed = [shape[d] for d in order]
    if traced.dtype.is_floating_point:
        made = torch.randn(packed, device=traced.device).to(traced.dtype)
    elif traced.dtype == torch.bool:
        made = torch.ones(packed, dtype=torch.bool, device=traced.device)
    else:
        made = torch.randint(0, max(limit, 1), packed, dtype=torch.int64, device=traced.device).to(traced.dtype)
    return made.permute(back) if order else made.reshape(())


def _index_limit(tensors: Sequence[fx.Node], variant: StrategyVariant) -> int:
    """Upper bound of random indices: the smallest dim of any floating-point operand and of any result."""
    dims = [size for n, shape in zip(tensors, variant.inputs) if n.meta["val"].dtype.is_floating_point for size in shape]
    return min([*dims, *(size for shape in variant.outputs for size in shape)], default=1)


def _sizes(node: fx.Node, variant: StrategyVariant) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Whole shape -> local shape, for shapes that the operation's arguments may contain."""
    values = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    values += [v for v in compat.pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return {tuple(v.shape): shape for v, shape in zip(values, variant.inputs + variant.outputs) if v.dim() > 1}


def _with_sizes(arguments: Any, sizes: dict[tuple[int, ...], tuple[int, ...]]) -> Any:
    if not sizes:
        return arguments

    def is_shape(x: Any) -> bool:
        return isinstance(x, (list, tuple)) and bool(x) and all(type(i) is int for i in x)

    return compat.pytree.tree_map(
        lambda x: list(sizes.get(tuple(x), tuple(x))) if is_shape(x) else x, arguments, is_leaf=is_shape)
