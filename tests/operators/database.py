"""torch's own database of operators (OpInfo): its entries, and samples of arguments in sizes that axes of 2 and 3 divide."""
from __future__ import annotations

import contextlib
import functools
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from passes.compat import pytree

SIZES = {"L": 24, "M": 12, "S": 6, "XS": 2}
"""Of dims in samples, in place of 20, 10, 5 and 3."""
UNEVEN = {"L": 20, "M": 10, "S": 5, "XS": 3}
OWN_SIZES = {"_segment_reduce"}
"""Entries whose samples hold numbers that fit no other sizes; with others, the kernel reads beyond its operands."""


@functools.cache
def entries() -> dict[str, Any]:
    """Entries by name; `nn.functional.pad.constant` is the variant `constant` of one."""
    found: dict[str, Any] = {}
    for entry in _module().op_db:
        name = ".".join(filter(None, (entry.name, entry.variant_test_name)))
        found[name if name not in found else f"{name}.{sum(n.startswith(name) for n in found)}"] = entry
    return found


def foreach_entries() -> list[Any]:
    """The entries of functions of lists, `_foreach_add` and so on."""
    return [entry for kind in ("unary", "binary", "pointwise", "reduce", "other")
            for entry in getattr(_module(), f"foreach_{kind}_op_db")]


def _module() -> Any:
    # torch's own test cases, which come with the database, want a package that the database itself does not.
    if "expecttest" not in sys.modules:
        with contextlib.suppress(ImportError):
            import expecttest  # noqa: F401  # pyright: ignore[reportMissingImports]
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations
    return common_methods_invocations


@contextlib.contextmanager
def sizes(of: dict[str, int]) -> Iterator[None]:
    """Samples that are made inside have dims of these sizes."""
    changed = []
    for name, module in list(sys.modules.items()):
        for size, value in of.items():
            before = vars(module).get(size) if name.startswith("torch.testing._internal.") else None
            if isinstance(before, int):
                changed.append((module, size, before))
                setattr(module, size, value)
    try:
        yield
    finally:
        for module, size, before in changed:
            setattr(module, size, before)


def dtypes(entry: Any) -> list[torch.dtype]:
    """Float64 or what is nearest to it; then bfloat16, integers that wrap early and late, bools and complex128."""
    there = entry.supported_dtypes("cpu")
    wanted = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.float8_e4m3fn)
    first = next((d for d in wanted if d in there), None)
    rest = (torch.bfloat16, torch.int64, torch.uint8, torch.int32, torch.bool, torch.complex128)
    return ([] if first is None else [first]) + [d for d in rest if d in there and d != first]


def samples(entry: Any, dtype: torch.dtype, limit: int, of: dict[str, int] | None = None) -> list[Any]:
    """At most `limit` samples, spread over all that the entry has. of: sizes of dims."""
    grad = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    if entry.name in OWN_SIZES:
        of = UNEVEN
    with sizes(of or SIZES), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Any] = []
        given = iter(entry.sample_inputs("cpu", dtype, requires_grad=grad))
        while True:
            try:
                found.append(next(given))
            except StopIteration:
                break
            except Exception:  # some makers fail for sizes that are not torch's: what they gave before stands
                if not found and of is not UNEVEN:
                    return samples(entry, dtype, limit, UNEVEN)
                break
    found = [s for s in found if all(t.layout is torch.strided and not t.is_quantized for t in tensors_of(s))]
    step = max(1, -(-len(found) // limit))
    return found[::step]


def tensors_of(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def function_of(entry: Any, sample: Any) -> Any:
    """The operator as a function of the sample's tensors, which returns a list of tensors."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        own, args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        result = entry.op(own, *args, **kwargs)
        return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]

    return call
