"""A few random scripts, on one device and split -> never silently another result. `python -m tests.scripts.fuzz` tries many."""
from __future__ import annotations

import pytest

from tests.scripts.fuzz import KINDS, search
from tests.scripts.fuzz_ranks import Ranks


@pytest.mark.timeout(240)
def test_random_scripts(tmp_path):
    ranks = Ranks(tmp_path)
    try:
        for mesh in ("dp", "tp"):
            counts = search(ranks, mesh, 5) + search(ranks, mesh, 1, of=KINDS["leaves"])
            assert counts["same"] and counts.keys() <= {"same", "refused"}, (mesh, counts)
    finally:
        ranks.stop()
