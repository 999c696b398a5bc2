"""Combinations of values that cover every pair of values of two options, and random ones."""
from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Combination = dict[str, int]
"""Index of the value of each option."""
CANDIDATES = 60


def pairs_of(combination: Combination) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(itertools.combinations(sorted(combination.items()), 2))


def covering(values: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool], seed: int = 0) -> list[Combination]:
    """Allowed combinations that cover every pair that an allowed one can have, built greedily: each is the best of some random
    ones. A pair that none of these has within 50 attempts counts as impossible."""
    rng, found = random.Random(seed), []
    full = {name: range(len(each)) for name, each in values.items()}
    left = {pair for one, other in itertools.combinations(sorted(full), 2)
            for pair in itertools.product(((one, k) for k in full[one]), ((other, k) for k in full[other]))}
    while left:
        wanted = min(left)
        candidates = []
        for _ in range(50 * CANDIDATES):
            drawn = {**{name: rng.choice(each) for name, each in full.items()}, **dict(wanted)}
            if allowed(drawn):
                candidates.append(drawn)
            if len(candidates) == CANDIDATES:
                break
        if not candidates:
            left.discard(wanted)
            continue
        best = max(candidates, key=lambda each: len(pairs_of(each) & left))
        left -= pairs_of(best)
        found.append(best)
    return found


def randoms(values: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool], count: int, seed: int,
            ) -> list[Combination]:
    """So many random combinations that are allowed."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        drawn = {name: rng.randrange(len(each)) for name, each in values.items()}
        if allowed(drawn):
            found.append(drawn)
    return found
