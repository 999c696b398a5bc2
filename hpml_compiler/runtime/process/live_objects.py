"""Live objects of the process by type. A scan takes tens of milliseconds: for compilation, never for a step."""
from __future__ import annotations

import gc
from itertools import compress
from typing import Any


def live_objects(*kinds: type, exact: bool = False) -> list[Any]:
    """Objects of these types that the garbage collector tracks. exact: without subclasses."""
    wanted = set(kinds) if exact else {each for kind in kinds for each in _with_subclasses(kind)}
    objects = gc.get_objects()
    # By type alone: isinstance would wake up lazy proxies. And in C: there are a million objects.
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))


def _with_subclasses(kind: type) -> set[type]:
    found, rest = {kind}, [kind]
    while rest:
        new = {*rest.pop().__subclasses__()} - found
        found |= new
        rest += new
    return found
