"""Judge one architecture on one mesh, in a rank that stays for the next one."""
from __future__ import annotations

import functools
import logging
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.scripts.compare import Outcome, Unfit, judge, seen
from tests.scripts.snapshot import Leaf, difference
from tests.scripts.use import Script, Use
from tests.zoo.models import Architecture, pick

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
PARTLY_FLOAT32 = 1e-5
"""Tolerance of a float64 model that computes in float32 in places, as HF's RMSNorm and losses do."""
UNRULED = " has no sharding rule"


@dataclass
class Result(Outcome):
    """The outcome, and what else the report tells. Verdicts besides those of uses: unfit (does not run on one device), torch
    (differs under aot_eager on one device just as much)."""

    dtype: str = ""
    replicated: tuple[str, ...] = ()
    """Operators without a rule."""
    said: tuple[str, ...] = ()
    """Warnings of hpml's."""
    parameters: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


class Fit(NamedTuple):
    """The dtype that an architecture trains in, the tolerance for it, and what one device sees."""

    dtype: torch.dtype
    tolerance: float
    leaves: tuple[Leaf, ...]


class Narrower(TorchDispatchMode):
    """Notices results of fewer bits than float64."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.itemsize < 8
                          for leaf in tree_leaves(result))
        return result


class Heard(logging.Handler):
    """Messages of hpml's of warning level."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("hpml").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hpml").removeHandler(self)


def step(architecture: Architecture, dtype: torch.dtype, script: Script) -> Any:
    """One training step as a script makes it: loss, gradients, parameters and buffers after the optimizer's step."""
    torch.set_default_dtype(dtype)
    model, batch = architecture.make(dtype)
    call, optimizer = script.compile(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    loss = loss_of(call(**batch))
    loss.backward()
    optimizer.step()
    return loss.item(), model


def loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss")
    return loss.sum() if loss is not None else output[0].square().mean()


@functools.lru_cache(maxsize=4)
def fit(name: str) -> Fit:
    """An architecture on one device. Raises Unfit."""
    architecture, errors = pick(name), []
    for dtype in TOLERANCES:
        try:
            with Narrower() as narrower:
                leaves = tuple(seen(_use(architecture, dtype, 0.0), Script(None, Path())))
        except Exception as error:
            errors.append(f"{dtype}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if leaves[1][1] != leaves[1][1]:
            raise Unfit(f"its loss is {leaves[1][1]}")
        partly = dtype == torch.float64 and narrower.found
        return Fit(dtype, PARTLY_FLOAT32 if partly else TOLERANCES[dtype], leaves)
    raise Unfit("; ".join(errors))


def _use(architecture: Architecture, dtype: torch.dtype, tolerance: float) -> Use:
    return Use(architecture.name, functools.partial(step, architecture, dtype), tolerance=tolerance)


def judged(name: str, mesh: str, rank: int, folder: Path) -> Outcome:
    """The outcome of an architecture on a mesh, or of `hpml plan` where `mesh` is "plan"."""
    from tests.zoo.plans import planned

    warnings.simplefilter("ignore")
    start = time.perf_counter()
    try:
        dtype, tolerance, expected = fit(name)
    except Unfit as error:
        return Result("unfit", str(error), time.perf_counter() - start)
    if mesh == "plan":
        return replace(planned(pick(name), dtype, expected), dtype=str(dtype).removeprefix("torch."))
    use = _use(pick(name), dtype, tolerance)
    with Heard() as heard:
        outcome = judge(use, mesh, folder, rank, list(expected))
    if outcome.verdict == "different" and (torchs := _as_torch(use, list(expected))):
        outcome = replace(outcome, verdict="torch", detail=f"{outcome.detail}; under aot_eager: {torchs}")
    missing = {message.partition(UNRULED)[0] for message in heard.messages if UNRULED in message}
    return Result(**vars(outcome), dtype=str(dtype).removeprefix("torch."), replicated=tuple(sorted(missing)),
                  said=tuple(dict.fromkeys(heard.messages)),
                  parameters=sum(value.numel() for at, value in expected if at + ".requires_grad" in dict(expected)))


def _as_torch(use: Use, expected: list[Leaf]) -> str | None:
    """How torch's own compilation differs from eager torch on one device, if it does."""
    class Alone(Script):
        def compile(self, model: Any, **options: Any) -> Any:
            return torch.compile(model, backend="aot_eager")

    return difference(seen(use, Alone(None, Path())), expected, use.tolerance)
