"""States of the random number generators of a process: torch's, CUDA's, NumPy's and Python's."""
from __future__ import annotations

import base64
import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hpml_compiler.runtime.consistency.initial_sync import generator_states
from hpml_compiler.runtime.process.compute_device import device_type


def random_states() -> dict[str, Any]:
    """The states, as JSON."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {"python": [version, list(numbers), gauss],
                             "numpy": [name, _text(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)]}
    for kind, state in zip(("torch", "cuda"), generator_states()):
        found[kind] = _text(bytes(state.numpy()))
    return found


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the states. That of CUDA is set only where this run computes on a GPU, too."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.frombuffer(base64.b64decode(keys), np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_state(states["torch"]))
    if "cuda" in states and device_type() == "cuda":
        torch.cuda.set_rng_state(_state(states["cuda"]))


def states_of_rank(states: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """States for this rank of a run of other size. states: of the ranks that saved, or one for all.

    Where ranks differed in Python's and NumPy's generators (each augments its own rows), ranks that were not there get
    seeds of their own; torch's, which draws the masks of the model, is the same on all.
    """
    if len(states) == 1 or rank < len(states):
        return states[min(rank, len(states) - 1)]
    seed = int.from_bytes(blake2b(f"{states[0]['python'][1][:8]} {rank} of {ranks}".encode(), digest_size=4).digest(), "big")
    version, numbers, gauss = random.Random(seed).getstate()
    name, keys, position, has_gauss, cached = np.random.RandomState(seed).get_state(legacy=True)
    return {**states[0], "python": [version, list(numbers), gauss],
            "numpy": [name, _text(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)]}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
