"""Warnings about the persistent caches: an unusable cache is reported once per process."""
from __future__ import annotations

import logging

from passes.errors import BadInput
from passes.filesystem.sqlite_table import Unusable

log = logging.getLogger("hpml")

_told: set[str] = set()


def warn_of_cache(what: str, error: BadInput) -> None:
    """Warn that `what`, a cache, cannot be read or written. All caches are in one folder: if one of them is unusable because of
    the disk, permissions or ownership, the others fail for the same reason, so repeats are logged at debug level only."""
    key = Unusable.__name__ if isinstance(error, Unusable) else str(error)
    log.log(logging.DEBUG if key in _told else logging.WARNING, "%s: %s", what, error)
    _told.add(key)
