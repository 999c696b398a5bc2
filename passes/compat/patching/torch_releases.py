"""The releases of torch that hpml is tested with."""
from __future__ import annotations

import functools
import logging

import torch
from packaging.version import Version

log = logging.getLogger("hpml")
FIRST, LAST = (2, 11), (2, 15)


def why_untested(version: str = torch.__version__) -> str | None:
    """A sentence about an untested release, None for a tested one."""
    release = Version(version).release[:2]
    if FIRST <= release <= LAST:
        return None
    tested = "{}.{} to {}.{}".format(*FIRST, *LAST)
    return f"torch {version} is not tested with this release of hpml, which knows {tested}"


@functools.cache
def warn_if_untested() -> None:
    """Warn once per process. The private modules that hpml uses may have changed: names are then missing, or calls raise."""
    if why := why_untested():
        log.warning("%s; if something fails that works with %d.%d, please report it", why, *LAST)
