"""Tapes made by hand and at random."""
from __future__ import annotations

import math
import random

from passes.simulation.memory.storage_program import ProgramOp, Storage, StorageProgram


def chain(sizes: list[int], us: list[float] | None = None, offload_us: list[float] | None = None) -> StorageProgram:
    """Layers one after another: each reads the storage before it; backward reads them all, the last one first, and makes as
    much as forward did."""
    n = len(sizes)
    us = us or [1.0] * n
    storages = [Storage("x", 0, None, "forward")]
    runs = []
    for k, size in enumerate(sizes):
        runs.append(ProgramOp(f"f{k}", False, us[k], (k,), (k + 1,)))
        storages.append(Storage(f"f{k}", size, k, "", 0.0, offload_us[k] if offload_us else math.inf))
    storages.append(Storage("tangents", 0, None, "backward"))
    tangent = n + 1
    for k in reversed(range(n)):
        storages.append(Storage(f"b{k}", sizes[k], len(runs)))
        runs.append(ProgramOp(f"b{k}", True, us[k], (tangent, k + 1, k), (len(storages) - 1,)))
        tangent = len(storages) - 1
    return StorageProgram(tuple(runs), tuple(storages), frozenset(), frozenset({tangent}))


def random_program(seed: int, layers: int = 6, offloading: bool = False) -> StorageProgram:
    """Forward with branches, some of it inlined or not repeatable; backward reads what it likes, in reverse."""
    draw, price = random.Random(seed), random.Random(seed)
    storages, runs = [Storage("x", 5, None, "forward")], []
    for k in range(layers):
        reads = tuple(sorted({draw.randrange(len(storages)), len(storages) - 1}))
        inlined = draw.random() < 0.3
        runs.append(ProgramOp(f"f{k}", False, draw.randint(1, 9), reads, (len(storages),), draw.random() < 0.9, inlined,
                              inlined or draw.random() < 0.3))
        storages.append(Storage(f"f{k}", draw.randint(1, 20), k, "", draw.random(),
                                price.randint(1, 12) if offloading and price.random() < 0.7 else math.inf))
    made = list(range(1, layers + 1))
    tangent = len(storages)
    storages.append(Storage("tangents", 2, None, "backward"))
    gradients = []
    for k in reversed(range(layers)):
        reads = tuple(dict.fromkeys((tangent, draw.choice(made), draw.choice(made[: k + 1]))))
        runs.append(ProgramOp(f"b{k}", True, 1.0, reads, (len(storages),), True, False, draw.random() < 0.5))
        tangent = len(storages)
        storages.append(Storage(f"b{k}", draw.randint(1, 20), len(runs) - 1))
        if draw.random() < 0.3:
            gradients.append(tangent)
    return StorageProgram(tuple(runs), tuple(storages), frozenset({layers}), frozenset({*gradients, tangent}))
