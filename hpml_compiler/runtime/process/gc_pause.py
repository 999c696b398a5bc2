"""Reduce garbage collection while millions of long-lived objects are created."""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = (200_000, 50, 100)
"""Thresholds of the generations, for `gc.set_threshold`."""


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager that makes garbage collection rare, for tracing and planning: it takes a sixth of the compile time.
    Higher thresholds of the script, or disabled collection, stay."""
    before = gc.get_threshold()
    if before[0] == 0:
        yield
        return
    gc.set_threshold(*map(max, before, SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)
