"""Uses of torch's database of operators: an operator in eager code, on a sharded output of a compiled graph, with its loss.
Not a family that the tests run.

Outputs of any size stay sharded here, and results of any size are recorded; in a run, only large ones are.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hpml_compiler.compile.wrapper import loss_of_script
from hpml_compiler.runtime.outputs import record, recorded_output
from passes.graph import graph_signature
from tests.operators import database
from tests.scripts import opinfo
from tests.scripts.use import Script, Use

STEPS = 2
FAMILY = "opinfo_outputs"


@contextlib.contextmanager
def small_outputs(wait: bool = False) -> Iterator[None]:
    """Outputs and results of any size are as large ones. wait: also as those whose graph waits for the script's loss."""
    names = [(graph_signature, "LEAST_SHARDED_BYTES"), (record, "SMALL_BYTES"), (recorded_output, "SMALL_BYTES")]
    names += [(loss_of_script, "SMALL_BYTES")] if wait else []
    changed = [(module, name, getattr(module, name)) for module, name in names]
    try:
        for module, name, _ in changed:
            setattr(module, name, -1)
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


class Before(nn.Module):
    """Operand of an operator: a sample's first tensor, a bit more or less, so that it stays where the operator is defined."""

    def __init__(self, sample: Any):
        super().__init__()
        own, *rest = database.tensors_of(sample)
        self.register_buffer("own", own.detach().clone())
        self.rest = [x.detach().clone() for x in rest]
        self.layer = nn.Linear(opinfo.WIDTH, math.prod(own.shape[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own * (1 + 1e-3 * self.layer(x).tanh().reshape(self.own.shape))


def choose(name: str) -> Any:
    """A sample whose first tensor has rows of floats, and on which a model can be trained; None if there is none."""
    entry = database.entries()[name]
    if "empty" in name:
        return None  # values that nobody has set
    for dtype in database.dtypes(entry)[:1]:
        found = [s for s in database.samples(entry, dtype, 24) if (own := database.tensors_of(s)[:1])
                 and own[0].is_floating_point() and own[0].ndim and own[0].numel() and own[0].shape[0] % 2 == 0]
        for sample in sorted(found, key=lambda s: -min(3, database.tensors_of(s)[0].ndim))[:12]:
            with contextlib.suppress(Exception):
                if all(math.isfinite(loss) for loss in _train(entry, sample, lambda model: model)[0]):
                    return sample
    return None


def _train(entry: Any, sample: Any, compiled: Callable[[nn.Module], Any]) -> tuple[list[float], list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Before(sample)
        function, call = database.function_of(entry, sample), compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses, results = [], []
        for step in range(STEPS):
            x = torch.arange(model.own.shape[0] * opinfo.WIDTH).view(-1, opinfo.WIDTH).double().sin() + step
            h = call(x)
            results = function(h, *(x.clone() for x in model.rest))
            rows = [opinfo.rows(result) for result in results]
            loss = h.square().mean() * 0.01 + sum(((part * 0.1).sin().mean() for part in rows), torch.zeros(()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [x.detach() for x in results], model
    finally:
        torch.set_default_dtype(before)


def _use(name: str) -> Any:
    def run(hp: Script) -> Any:
        torch.manual_seed(0)
        with small_outputs():
            return _train(database.entries()[name], choose(name), hp.compile)

    run.__module__, run.use = __name__, Use(f"{FAMILY}.{name}", run, tolerance=1e-7, limit_s=60)  # type: ignore[attr-defined]
    return run


globals().update({f"operator {name}": _use(name) for name in database.entries()})
