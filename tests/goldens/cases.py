"""The cases whose compilation is recorded: uses, and models of a file, by options and number of ranks."""
from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.scripts.use import FURTHER, MESHES, Script, Use, families, find, uses_of

COMMON: dict[str, Any] = {"costs": "roofline"}
ONE_RANK: dict[str, dict[str, Any]] = {"alone": {}, "alone_parts": {"microbatches": 2}, "alone_budget": {"memory_budget": 1},
                                       "alone_blocks": {"compile_blocks": "on"}}
OF_MODELS: dict[str, dict[str, Any]] = {
    "free": {}, "tp": {"mesh": {"tp": 2}}, "zero3": {"mesh": {"dp": 2}, "zero": 3},
    "budget": {"mesh": {"dp": 2}, "memory_budget": 1}, "microbatches": {"mesh": {"dp": 2}, "microbatches": 2},
    "pp": {"mesh": {"pp": 2}, "microbatches": 2}, "blocks": {"mesh": {"tp": 2}, "compile_blocks": "on"}}
"""A memory_budget of 1 byte stands for the least that hpml says would do."""


@dataclass(frozen=True)
class Case:
    """name: a use, or FILE:MODEL. place: a key of the tables above, or of the meshes of uses."""

    name: str
    place: str

    @property
    def ranks(self) -> int:
        return 1 if self.place in ONE_RANK else 2

    @property
    def options(self) -> dict[str, Any]:
        table = OF_MODELS if self.of_model and self.ranks == 2 else {**ONE_RANK, **MESHES, **FURTHER}
        return {**COMMON, **table[self.place]}

    @property
    def of_model(self) -> bool:
        return ":" in self.name

    def use(self) -> Use:
        if not self.of_model:
            return find(self.name)
        file, _, model = self.name.rpartition(":")
        return Use(self.name, functools.partial(train, load(file), model))


def cases(models: Path | None) -> list[Case]:
    uses = [use for family in families() for use in uses_of(family)]
    found = [Case(use.name, place) for use in uses for place in (*MESHES, *ONE_RANK)]
    if models is not None:
        found += [Case(f"{models}:{name}", place) for name in load(str(models)).MODELS for place in (*OF_MODELS, *ONE_RANK)]
    return found


def train(module: Any, model: str, script: Script) -> Any:
    """Two steps of a model of a file."""
    network, batch = module.build(model)
    network, batch = network.double(), {key: _double(value) for key, value in batch.items()}
    call, optimizer = script.compile(network), torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        output = call(**batch)
        loss = output["loss"] if not isinstance(output, torch.Tensor) else output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, network, optimizer


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@functools.cache
def load(file: str) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
