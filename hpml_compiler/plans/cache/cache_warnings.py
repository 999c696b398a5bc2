"""Warnings about the persistent caches: an unusable cache is reported once per session."""
from __future__ import annotations

import logging

from passes.errors import BadInput
from passes.filesystem.sqlite_table import Unusable
from passes.session_state import state_of

log = logging.getLogger("hpml")


class _ReportedCaches(set[str]):
    """Causes that a warning has named."""


def warn_of_cache(what: str, error: BadInput) -> None:
    """Warn that `what`, a cache, cannot be read or written. All caches are in one folder: if one of them is unusable because of
    the disk, permissions or ownership, the others fail for the same reason, so repeats are logged at debug level only."""
    key = Unusable.__name__ if isinstance(error, Unusable) else str(error)
    reported = state_of(_ReportedCaches)
    log.log(logging.DEBUG if key in reported else logging.WARNING, "%s: %s", what, error)
    reported.add(key)
