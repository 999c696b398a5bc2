"""Compare a use's result with its expected verdict."""
from __future__ import annotations

import re

from tests.scripts.compare import Outcome
from tests.scripts.known import KNOWN
from tests.scripts.use import Use, on


def complaint(use: Use, mesh: str, outcome: Outcome) -> str | None:
    """What is wrong, in words; None if the use ran as on one device, or was refused in the words that it names."""
    words = on(mesh, use.refused)
    as_expected = outcome.verdict == ("refused" if words else "same")
    if (use.name, mesh) in KNOWN:
        return f"{use.name} on {mesh} does not fail any more: take it out of known.py" if as_expected else None
    if not as_expected:
        return f"{use.name} on {mesh}: {outcome.verdict}\n{outcome.detail}"
    if words and not re.search(words, outcome.detail):
        return f"{use.name} on {mesh} is refused, but not with the words {words!r}:\n{outcome.detail}"
    return None
