"""Looking for garbage: how often Python does that while millions of small objects are made that live on."""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = (200_000, 50, 100)
"""Thresholds of the generations, as `gc.set_threshold` takes them."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """For traces and what is made of them: looking for garbage among them takes a sixth of the time of compiling. Who collects
    still less often, or never, keeps to that."""
    before = gc.get_threshold()
    if before[0] == 0:
        yield
        return
    gc.set_threshold(*map(max, before, SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)
