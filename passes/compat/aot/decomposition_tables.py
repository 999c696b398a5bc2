"""Decompositions that hpml traces with: inductor's, without wrong ones, and those of fused layers."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from passes.compat.aot.encoder_layers import encoder_layer, multi_head_attention
from passes.compat.patching.patches import BYTES_DECOMPOSED_WRONGLY, DECOMPOSED_WRONGLY, replaced

aten = torch.ops.aten

WRONG_OF_HALVES = ("grid_sampler_2d.default",)
"""Not used for bfloat16 and float16, in which they round coordinates: the operators compute these in float32."""
SCALED = ("addmm.default", "baddbmm.default", "addmv.default", "addbmm.default", "addr.default")
"""Not used for integers with fractional factors, which the operators truncate first."""

FUSED_LAYERS = {"_transformer_encoder_layer_fwd.default": encoder_layer,
                "_native_multi_head_attention.default": multi_head_attention}


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decomposition table, without wrong entries."""
    import torch._inductor.lowering as lowering  # fills the table; without it some ops stay whole
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for op in _operators(DECOMPOSED_WRONGLY):
        table.pop(op, None)
        _falls_back(op, lowering)
    for op in _operators(BYTES_DECOMPOSED_WRONGLY):
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
    table.update((op, decomposed) for name, decomposed in FUSED_LAYERS.items() for op in _operators((name,)))
    return table


def eager_decompositions() -> dict[Any, Callable[..., Any]]:
    """The same table without operators that draw random numbers: inductor's replacements, made for its own generator, draw
    other numbers than the operators. Composites of other operators are included."""
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
    replacing: dict[str, Callable[[Any], Any]] = {}
    for names, instead in ((DECOMPOSED_WRONGLY, None), (BYTES_DECOMPOSED_WRONGLY, _unless_bytes)):
        for op in _operators(names):
            if any(key in op.py_kernels for key in DECOMPOSING):
                name = op.name().removeprefix("aten::")
                name = name if "." in name else f"{name}.default"
                replacing[f"ops.aten.{name}.py_kernels"] = functools.partial(_kernels, op, instead)
    with replaced(replacing):
        yield


def _operators(names: tuple[str, ...]) -> list[OpOverload]:
    """The operators that exist in this release."""
    found = []
    for name in names:
        packet, overload = name.split(".")
        if hasattr(aten, packet) and overload in getattr(aten, packet).overloads():
            found.append(getattr(getattr(aten, packet), overload))
    return found


DECOMPOSING = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Keys of kernels that are decompositions."""


def _kernels(op: OpOverload, instead: Callable[..., Any] | None, kernels: Mapping[DispatchKey, Any]) -> dict[DispatchKey, Any]:
    """The kernels of an operator without decompositions, or with `instead(op, decomposition)` in place of each."""
    rest = {key: kernel for key, kernel in kernels.items() if key not in DECOMPOSING}
    own = {key: kernel for key, kernel in kernels.items() if key in DECOMPOSING}
    return rest if instead is None else rest | {key: instead(op, kernel) for key, kernel in own.items()}


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


def _unless_bytes(op: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")

    @functools.wraps(kernel)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != torch.uint8:
            return kernel(x, *args, **kwargs)
        if composite:
            return op._op_dk(DispatchKey.CompositeImplicitAutograd, x, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, *args, **kwargs)

    return call


def _falls_back(op: OpOverload, lowering: Any) -> None:
    """Make inductor call the operator itself."""
    if op not in lowering.lowerings:
        lowering.make_fallback(op, warn=False, override_decomp=True)
