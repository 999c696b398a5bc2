"""Live objects of the process by type. A scan takes tens of milliseconds: for compilation, never for a step."""
from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Collection, Iterator
from itertools import compress
from typing import Any

import torch
from torch import nn

from passes.session_state import state_of


class _SharedScan:
    """References to the tensors, modules and optimizers that were alive when `one_scan` was entered and first asked."""

    def __init__(self) -> None:
        self.shares, self.found = False, list[weakref.ref[Any]]()


@contextlib.contextmanager
def one_scan() -> Iterator[None]:
    """Context in which all calls of `live_objects` share one scan. What is made inside is not found: the script runs nothing
    meanwhile, and what hpml makes is not looked for."""
    scan = state_of(_SharedScan)
    outermost, scan.shares = not scan.shares, True
    try:
        yield
    finally:
        if outermost:
            scan.shares = False
            scan.found.clear()


def live_objects(*kinds: type, exact: bool = False) -> list[Any]:
    """Objects of these types (tensors, modules or optimizers) that the garbage collector tracks. exact: without subclasses."""
    wanted = set(kinds) if exact else _with_subclasses(*kinds)
    scan = state_of(_SharedScan)
    if not scan.shares:
        return _scanned(wanted)
    if not scan.found:
        scan.found = [*map(weakref.ref, _scanned(_with_subclasses(torch.Tensor, nn.Module, torch.optim.Optimizer)))]
    return [each for ref in scan.found if (each := ref()) is not None and type(each) in wanted]


def _scanned(wanted: Collection[type]) -> list[Any]:
    # By type alone: isinstance would wake up lazy proxies. And in C: there are a million objects.
    objects = gc.get_objects()
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))


def _with_subclasses(*kinds: type) -> set[type]:
    found, rest = {*kinds}, [*kinds]
    while rest:
        new = {*rest.pop().__subclasses__()} - found
        found |= new
        rest += new
    return found
