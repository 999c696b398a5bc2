"""A use of torch: a small script that runs once on one device and once split, and says what it saw.

    @use
    def accumulates(hp):
        model = mlp()
        call, optimizer = hp.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
        ...
        return losses, model, optimizer

On one device `hp.compile` gives back what it gets, and `hp.distribute` too. What is returned may be any nest of tensors,
numbers, modules (parameters, gradients, buffers) and optimizers (their whole state). A script is seeded, and its default
dtype is float64.
"""
from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hpml_compiler

MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}}, "tp": {"mesh": {"tp": 2}}, "unpinned": {}, "parts": {"mesh": {"dp": 2}, "microbatches": 2},
    "stages": {"mesh": {"pp": 2}, "microbatches": 2}}
"""Options of each."""
FURTHER: dict[str, dict[str, Any]] = {
    "zero2": {"mesh": {"dp": 2}, "zero": 2}, "zero3": {"mesh": {"dp": 2}, "zero": 3},
    "budget": {"mesh": {"dp": 2}, "memory_budget": 1}}
"""Those that uses run on only when asked to. budget: the smallest one that hpml says would do."""
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "dp4": {"mesh": {"dp": 4}}, "stages of 2": {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2}}
"""Those of four ranks, likewise."""
FAMILIES = "tests.scripts.uses"
ByMesh = str | Mapping[str, str]
"""One text for all meshes, or mesh -> text for some."""


@dataclass
class Script:
    """Functions that differ when a use is split. `mesh` is a name in MESHES, FURTHER or FOUR_RANKS; None is one device."""

    mesh: str | None
    folder: Path
    """For files; the same on all ranks, and another one for each run."""
    rank: int = 0
    budget_bytes: int = 0
    """In place of the one that a mesh has."""
    places: list[str] = field(default_factory=list)
    """Places where the work on outputs ran, once it did."""

    def compile(self, model: Any, **options: Any) -> Any:
        if self.mesh is None:
            return model
        budget = {"memory_budget": self.budget_bytes} if self.budget_bytes else {}
        options = {"compiler": "eager", **(MESHES | FURTHER | FOUR_RANKS)[self.mesh], **budget, **options}
        return torch.compile(model, backend="hpml", options=options)

    def distribute(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader if self.mesh is None else hpml_compiler.distribute(loader)


@dataclass(frozen=True)
class Use:
    name: str
    run: Callable[[Script], Any]
    tolerance: float = 1e-9
    """Absolute and relative. Only what computes in less than float64 needs another one."""
    refused: ByMesh = field(default_factory=dict)
    """hpml says that it cannot do this: a regular expression for its words."""
    compiles: bool = True
    """False: nothing of it comes to the backend, and it runs whole on every rank."""
    generator: bool = True
    """Whether torch's generator is left as on one device. Not by loaders of rows of each rank's own."""
    limit_s: float = 90
    in_tests: bool = True
    """False: only `python -m tests.scripts` runs it."""

    @property
    def family(self) -> str:
        return self.name.split(".")[0]


def use(function: Callable[[Script], Any] | None = None, **how: Any) -> Any:
    """Mark a function of a family's module as a use; `how` are the fields of Use."""
    def mark(function: Callable[[Script], Any]) -> Callable[[Script], Any]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        function.use = Use(name, function, **how)  # type: ignore[attr-defined]
        return function

    return mark if function is None else mark(function)


def on(mesh: str, text: ByMesh) -> str | None:
    """What is said for a mesh, if anything."""
    return text if isinstance(text, str) else text.get(mesh)


def families() -> list[str]:
    package = importlib.import_module(FAMILIES)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def uses_of(family: str) -> list[Use]:
    """The uses of a family, in the order in which they are written."""
    module = importlib.import_module(f"{FAMILIES}.{family}" if family in families() else f"tests.scripts.{family}")
    return [value.use for value in vars(module).values()
            if isinstance(getattr(value, "use", None), Use) and value.__module__ == module.__name__]


def find(name: str) -> Use:
    return next(use for use in uses_of(name.split(".")[0]) if use.name == name)


def in_turn() -> list[tuple[Use, str]]:
    """Each use with one mesh, the meshes in turn within a family."""
    names = list(MESHES)
    return [(use, names[number % len(names)]) for family in families()
            for number, use in enumerate(use for use in uses_of(family) if use.in_tests)]
