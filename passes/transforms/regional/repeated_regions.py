"""Find repetitions in a list of calls: the layers of a model, as they follow one another in a traced graph.

Calls are compared by target, constants, and shapes of their results, not by operands: the caller checks that the wiring
of two stretches is equal.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import Node

from passes.graph.fx_nodes import constants_of

LEAST_CALLS = 8
"""Minimum number of calls in a repeated stretch."""
MOST_PERIODS = 24


def described(value: Any) -> Hashable:
    """Properties of a fake value that compiled code depends on: sizes, strides, dtype, device, 16-byte alignment."""
    if isinstance(value, torch.Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return tuple(value.shape), tuple(value.stride()), str(value.dtype), str(value.device), aligned
    if isinstance(value, (tuple, list)):
        return tuple(map(described, value))
    return repr(value)


def repetition_cuts(nodes: Sequence[Node]) -> list[int]:
    """Positions at which to cut a list of calls so that most of them lie in repeated stretches between cuts."""
    kinds: dict[Hashable, int] = {}
    told = [kinds.setdefault((node.target, constants_of(node), described(node.meta.get("val"))), len(kinds)) for node in nodes]
    position = {node: k for k, node in enumerate(nodes)}
    last = [max((position.get(user, len(nodes)) for user in node.users), default=k) for k, node in enumerate(nodes)]
    found: list[int] = []
    spans = [(0, len(nodes))]
    while spans:
        start, end = spans.pop()
        run = _longest_run(told, start, end)
        if run is None:
            continue
        first, period, copies = _aligned(*run, last)
        found += [first + k * period for k in range(copies + 1)]
        spans += [(start, first), (first + copies * period, end)]
    return sorted(set(found))


def _longest_run(told: Sequence[int], start: int, end: int) -> tuple[int, int, int] | None:
    """(first, period, length) of the periodic run of calls in [start, end) that saves most."""
    where: dict[int, list[int]] = defaultdict(list)
    for k in range(start, end):
        where[told[k]].append(k)
    periods = Counter(b - a for places in where.values() for a, b in zip(places, places[1:]) if b - a >= LEAST_CALLS)
    best, most = None, 0
    for period, _ in periods.most_common(MOST_PERIODS):
        begun = None
        for k in range(start, end - period + 1):
            if k < end - period and told[k] == told[k + period]:
                begun = k if begun is None else begun
            elif begun is not None:
                saved = (k - begun) // period * period
                if saved > most or saved == most and best is not None and saved and period < best[1]:
                    best, most = (begun, period, k - begun + period), saved
                begun = None
    return best


def _aligned(first: int, period: int, length: int, last: Sequence[int]) -> tuple[int, int, int]:
    """(first, period, copies) of the stretches to cut out: at the offset where the fewest values cross from one to the next,
    such as the residual sum, with as many copies as fit. last: for each call, the position of its last reader."""
    def crossing(shift: int) -> int:
        at = first + shift + period
        return sum(last[k] >= at and last[k] < at + period for k in range(at - period, at))

    def copies(shift: int) -> int:
        return (length - shift) // period

    shifts = [shift for shift in range(period) if copies(shift) >= 2] or [0]
    shift = min(shifts, key=lambda s: (crossing(s), -copies(s), s))
    return first + shift, period, copies(shift)
