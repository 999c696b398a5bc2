"""Decompositions that hpml traces with: inductor's, without those whose results differ from the operator's."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

aten = torch.ops.aten

WRONG = ("multilabel_margin_loss_forward.default",)
"""Never used: a target of -1, which ends a row's targets, adds to the loss."""
WRONG_OF_BYTES = tuple(f"{name}.{overload}" for overload in ("default", "vec") for name in (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa"))
"""Not used for images of uint8, which the operators round otherwise."""
WRONG_OF_HALVES = ("grid_sampler_2d.default",)
"""Not used for bfloat16 and float16, in which they round coordinates: the operators compute these in float32."""
SCALED = ("addmm.default", "baddbmm.default", "addmv.default", "addbmm.default", "addr.default")
"""Not used for integers with fractional factors, which the operators truncate first."""


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decomposition table, without wrong entries."""
    import torch._inductor.lowering as lowering  # fills the table; without it some ops stay whole
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for op in _operators(WRONG):
        table.pop(op, None)
        _falls_back(op, lowering)
    for op in _operators(WRONG_OF_BYTES):
        if op in table:
            table[op] = _unless(table[op], torch.uint8)
            _falls_back(op, lowering)
    for op in _operators(WRONG_OF_HALVES):
        if op in table:
            table[op] = _unless(table[op], torch.bfloat16, torch.float16)
            _falls_back(op, lowering)
    for op in _operators(SCALED):
        if op in table:
            table[op] = _unless_truncated(table[op])
            _falls_back(op, lowering)
    return table


def eager_decompositions() -> dict[Any, Callable[..., Any]]:
    """The same table without operators that draw random numbers: inductor's replacements, made for
    its own generator, draw other numbers than the operators. Composites of other operators are included."""
    table = {op: decomposed for op, decomposed in inductor_decompositions().items()
             if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags or op._can_decompose()}
    return table | dict.fromkeys(_operators(("eye.default", "eye.m")), _eye)


def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
         device: Any = None, pin_memory: bool | None = None) -> Any:
    """torch's own decomposition counts in uint16 from 256 rows on, for which only inductor can make a range."""
    if layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    rows, columns = torch.arange(n, device=device), torch.arange(n if m is None else m, device=device)
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


@contextlib.contextmanager
def without_wrong_decompositions() -> Iterator[None]:
    """Context in which operators are not traced through the wrong decompositions that torch registers as their kernels,
    and which its Python dispatcher prefers to any table."""
    before: list[tuple[OpOverload, dict[DispatchKey, Callable[..., Any]]]] = []
    for names, replaced in ((WRONG, lambda op, kernels: {}), (WRONG_OF_BYTES, _kernels_unless_bytes)):
        for op in _operators(names):
            own = {key: op.py_kernels[key] for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
                   if key in op.py_kernels}
            if own:
                before.append((op, own))
                _put(op, own, replaced(op, own))
    try:
        yield
    finally:
        for op, own in before:
            _put(op, own, own)


def _operators(names: tuple[str, ...]) -> list[OpOverload]:
    """The operators that exist in this release."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        if hasattr(aten, packet) and overload in getattr(aten, packet).overloads():
            found.append(getattr(getattr(aten, packet), overload))
    return found


def _put(op: OpOverload, old: Mapping[DispatchKey, Any], new: Mapping[DispatchKey, Any]) -> None:
    for key in old:
        op.py_kernels.pop(key, None)
    op.py_kernels.update(new)
    op._dispatch_cache.clear()


def _unless(decomposed: Callable[..., Any], *dtypes: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(decomposed)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if x.dtype in dtypes else decomposed(x, *args, **kwargs)

    return call


def _unless_truncated(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decomposed)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = all(int(kwargs.get(k, 1)) == kwargs.get(k, 1) for k in ("alpha", "beta"))
        return decomposed(x, *args, **kwargs) if whole or x.is_floating_point() or x.is_complex() else NotImplemented

    return call


def _kernels_unless_bytes(op: OpOverload, kernels: Mapping[DispatchKey, Any]) -> dict[DispatchKey, Any]:
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")

    def instead(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.dtype != torch.uint8:
                return kernel(x, *args, **kwargs)
            if composite:
                return op._op_dk(DispatchKey.CompositeImplicitAutograd, x, *args, **kwargs)
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, *args, **kwargs)

        return call

    return {key: instead(kernel) for key, kernel in kernels.items()}


def _falls_back(op: OpOverload, lowering: Any) -> None:
    """Make inductor call the operator itself."""
    if op not in lowering.lowerings:
        lowering.make_fallback(op, warn=False, override_decomp=True)
