"""Uses of torch's database of operators: an operator between two linear layers, trained. Not a family that the tests run."""
from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.operators import database
from tests.scripts.use import Script, Use

WIDTH = 4
STEPS = 2


class Between(nn.Module):
    """A layer, an operator of what it gives and of the sample's other tensors, and a layer."""

    def __init__(self, entry: Any, sample: Any, apart: bool = False):
        """apart: the operator gets the sample as it is, where it has no gradient."""
        super().__init__()
        self.function, self.given = database.function_of(entry, sample), []
        for number, tensor in enumerate(database.tensors_of(sample)):
            self.register_buffer(f"given{number}", tensor.detach().clone())
            self.given.append(f"given{number}")
        own = getattr(self, self.given[0]) if self.given else torch.zeros(1)
        self.shape, self.floats = own.shape, bool(self.given) and own.is_floating_point() and not apart
        self.before = nn.Linear(WIDTH, math.prod(own.shape[1:]) if own.ndim else 1)
        widths = [rows(x).shape[1] for x in self._results(own)]
        self.after = nn.Linear(widths[0] if widths else WIDTH, 3)

    def _results(self, own: torch.Tensor) -> list[torch.Tensor]:
        rest = [getattr(self, name) for name in self.given[1:]]
        return self.function(own, *rest) if self.given else self.function()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        if self.floats:  # a bit more or less than the sample, so that it stays where the operator is defined
            results = self._results(getattr(self, self.given[0]) * (1 + 1e-3 * h.tanh().reshape(self.shape)))
        else:
            results = self._results(getattr(self, self.given[0]) if self.given else h)
        parts = [rows(result) for result in results]
        loss = h.square().mean() * 0.01
        if parts:
            loss = loss + self.after(parts[0]).square().mean()
        return loss + sum(((part * 0.1).sin().mean() for part in parts[1:]), torch.zeros(()))


def rows(result: torch.Tensor) -> torch.Tensor:
    """Any result as float64 of two dims."""
    if result.is_complex():
        result = torch.view_as_real(result.resolve_conj())
    result = result.to(torch.float64)
    return result.flatten(1) if result.ndim > 1 else result.reshape(1, -1)


def choose(name: str) -> Any:
    """A sample on which a model can be trained, rather one of several dims, and whether apart from the operator; None if there
    is none."""
    entry = database.entries()[name]
    if "empty" in name:
        return None  # values that nobody has set
    for dtype in database.dtypes(entry)[:1]:
        found = database.samples(entry, dtype, 24)
        ranked = sorted(found, key=lambda s: -max((min(3, t.ndim) for t in database.tensors_of(s)[:1] if t.numel()), default=0))
        for apart, sample in [(apart, sample) for apart in (False, True) for sample in ranked[:12]]:
            with contextlib.suppress(Exception):
                if all(math.isfinite(loss) for loss in _train(entry, sample, apart, lambda model: model)[0]):
                    return sample, apart
    return None


def _train(entry: Any, sample: Any, apart: bool, compiled: Callable[[nn.Module], Any]) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Between(entry, sample, apart)
            call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), 0.01)
            losses = []
            for step in range(STEPS):
                x = torch.arange(max([1, *model.shape[:1]]) * WIDTH).view(-1, WIDTH).double().sin() + step
                loss = call(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses, model
    finally:
        torch.set_default_dtype(before)


def _use(name: str) -> Any:
    def run(hp: Script) -> Any:
        sample, apart = choose(name)
        torch.manual_seed(0)
        return _train(database.entries()[name], sample, apart, hp.compile)

    run.__module__, run.use = __name__, Use(f"opinfo.{name}", run, tolerance=1e-7, limit_s=60)  # type: ignore[attr-defined]
    return run


globals().update({f"opinfo {name}": _use(name) for name in database.entries()})
