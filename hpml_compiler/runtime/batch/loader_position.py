"""Position of a loader in the data: which pass, how many batches of it, and the random states that the pass began with."""
from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from passes.errors import BadInput


class LoaderPosition:
    """Position in an iterable of batches that is passed over again and again.

    To resume, the pass is begun with the random states that it began with, and the batches that were consumed are loaded and
    dropped, so that shuffling, augmentation and workers are where they were; then the script's random states are set again. A
    loader that has a state dict of its own (torchdata's StatefulDataLoader) is not replayed.

    passes: number of passes before this one. batches: consumed in this one.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.passes, self.batches = 0, 0
        self._began: dict[str, Any] | None = None
        """Random states at the begin of this pass."""
        self._resumes = False

    @property
    def _stateful(self) -> bool:
        return callable(getattr(self._loader, "state_dict", None)) and callable(getattr(self._loader, "load_state_dict", None))

    def iterate(self) -> Iterator[Any]:
        """The batches of a pass, from the position on."""
        resumes, self._resumes = self._resumes, False
        if resumes:
            now = _states(self._loader)
            if not self._stateful:
                _restore(self._loader, self._began)
            batches = iter(self._loader)
            for _ in range(0 if self._stateful else self.batches):
                if next(batches, self) is self:
                    raise BadInput(f"the loader has fewer than the {self.batches} batches that were consumed of it",
                                   "hpml_compiler.distribute", "give the loader that the checkpoint was saved with")
            _restore(self._loader, now, generators=False)
        else:
            self.passes += self._began is not None  # the one before was left early
            self._began, self.batches = _states(self._loader), 0
            batches = iter(self._loader)
        for batch in batches:
            self.batches += 1
            yield batch
        self.passes += 1
        self.batches, self._began = 0, None

    def state_dict(self) -> dict[str, Any]:
        inner = self._loader.state_dict() if self._stateful else None  # type: ignore[attr-defined]
        return {"passes": self.passes, "batches": self.batches, "began": self._began, "loader": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "passes" not in state or (state["loader"] is not None) != self._stateful:
            raise BadInput("the position in the data was saved by a loader of another kind", "hpml_compiler.distribute",
                           "give the kind of loader that the checkpoint was saved with: one with a state dict, or one without")
        self.passes, self.batches, self._began = state["passes"], state["batches"], state["began"]
        self._resumes = self._began is not None
        if self._stateful:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """The generators that a loader and its samplers were given."""
    seen: list[Any] = []
    queue = [loader]
    while queue:
        item = queue.pop()
        if item is None or any(item is other for other in seen):
            continue
        seen.append(item)
        held = getattr(item, "__dict__", {})
        if isinstance(held.get("generator"), torch.Generator) and all(held["generator"] is not other for other in seen):
            seen.append(held["generator"])
            yield held["generator"]
        queue += [held.get(name) for name in ("sampler", "batch_sampler", "base_dataloader", "_loader")]


def _states(loader: Any) -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(legacy=True), "python": random.getstate(),
            "generators": [generator.get_state() for generator in _generators(loader)]}


def _restore(loader: Any, states: Any, generators: bool = True) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(tuple(states["numpy"]))
    random.setstate(states["python"])
    for generator, state in zip(_generators(loader), states["generators"]) if generators else ():
        generator.set_state(state)
