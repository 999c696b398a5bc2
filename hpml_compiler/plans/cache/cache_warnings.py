"""Warnings about caches of earlier launches: a cache that cannot be used is reported once per process."""
from __future__ import annotations

import logging

from passes.errors import BadInput
from passes.filesystem.sqlite_table import Unusable

log = logging.getLogger("hpml")

_told: set[str] = set()


def warn_of_cache(what: str, error: BadInput) -> None:
    """Warn that `what` of earlier launches cannot be read or kept. All caches are in one folder: if one of them cannot be used,
    because of the disk, of rights or of who wrote it, what the others say next is the same again, and is logged for debugging
    only."""
    key = Unusable.__name__ if isinstance(error, Unusable) else str(error)
    log.log(logging.DEBUG if key in _told else logging.WARNING, "%s: %s", what, error)
    _told.add(key)
