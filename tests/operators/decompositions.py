"""Decompositions against their operators: outputs and gradients of a traced graph and of torch."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.op_rules.rule_table import is_random
from tests.operators import database
from tests.operators.calls import trace

ROUNDING = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-4, torch.complex64: 1e-4}
COMPILERS = ("inductor", "eager")
"""Each has a table of its own; with that of "eager", random numbers are those of torch."""

SEED = 42
"""What the entries that draw random numbers set themselves, when they are called and thus not in the traced graph."""


def differences(name: str, first: int = 8, others: int = 3, of: dict[str, int] | None = None,
                compilers: Sequence[str] = COMPILERS) -> list[str]:
    """Samples of an entry for which a traced graph returns anything else than eager torch."""
    entry = database.entries()[name]
    if "empty" in name:
        return []  # values that nobody has set
    found = []
    for number, dtype in enumerate(database.dtypes(entry)):
        for sample in database.samples(entry, dtype, others if number else first, of):
            for compiler in compilers:
                wrong = _difference(database.function_of(entry, sample), database.tensors_of(sample), compiler)
                if wrong:
                    shapes = [f"{t.dtype}{list(t.shape)}" for t in database.tensors_of(sample)]
                    found.append(f"{name}({', '.join(shapes)}, {sample.args}, {sample.kwargs}) by {compiler}: {wrong}"[:1500])
    return found


def _difference(function: Any, tensors: list[torch.Tensor], compiler: str) -> str:
    try:
        traced = trace(function, tensors, compiler)
    except Exception:
        return ""  # counted as untraceable at rule level
    if compiler == "inductor" and any(n.op == "call_function" and is_random(n.target) for n in traced.gm.graph.nodes):
        return ""  # inductor draws others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        try:
            outputs = function(*leaves)
        except Exception as error:
            return f"eager torch raises {type(error).__name__}"
        tangents = [value for node, value in zip(traced.gm.graph.find_nodes(op="placeholder"), traced.values)
                    if node.name.startswith("tangents") and "token" not in node.name]
        torch.manual_seed(SEED)
        made = _flat(fx.Interpreter(traced.gm).run(*traced.values))
    try:
        wanted = [*outputs, *_gradients(outputs, leaves, tangents)]
    except RuntimeError as error:
        if "up to multiplication by" not in str(error):
            raise
        return ""  # of eigenvectors, whose phase is nobody's: random gradients make no sense
    tokens = sum(node.name.startswith("tangents_token") for node in traced.gm.graph.find_nodes(op="placeholder"))
    made = made[len(made) - len(wanted) - tokens : len(made) - tokens]  # before them, inputs that were written
    for number, (got, want) in enumerate(zip(made, wanted)):
        if got is None or want is None:
            continue
        tolerance = ROUNDING.get(want.dtype)
        try:
            torch.testing.assert_close(got.detach(), want.detach(), equal_nan=True, check_stride=False,
                                       **({"rtol": tolerance, "atol": tolerance} if tolerance else {}))
        except AssertionError as error:
            return f"{'output' if number < len(outputs) else 'gradient'} {number}: {' '.join(str(error).split())}"
    return ""


def _flat(results: Any) -> list[Any]:
    return [x for part in results for x in (_flat(part) if isinstance(part, (list, tuple)) else [part])]


def _gradients(outputs: list[torch.Tensor], leaves: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[Any]:
    if not tangents:
        return []
    differentiable = [x for x in outputs if x.requires_grad]
    assert len(differentiable) == len(tangents), "one tangent per output that has a gradient"
    wanted = [x for x in leaves if x.requires_grad]
    grads = iter(torch.autograd.grad(differentiable, wanted, [t.to(x.dtype) for t, x in zip(tangents, differentiable)],
                                     allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in leaves]
