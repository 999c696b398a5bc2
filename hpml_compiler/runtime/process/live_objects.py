"""Live objects of the process by type. A scan takes tens of milliseconds: for compilation, never for a step."""
from __future__ import annotations

import gc
from itertools import compress
from typing import Any


def live_objects(*kinds: type, exact: bool = False) -> list[Any]:
    """Objects of these types that the garbage collector tracks. exact: without subclasses."""
    objects = gc.get_objects()
    # Types alone are looked at: isinstance would wake up lazy proxies. And in C: there are a million objects.
    present = {kind for kind in set(map(type, objects)) if (kind in kinds if exact else issubclass(kind, kinds))}
    return list(compress(objects, map(present.__contains__, map(type, objects)))) if present else []
