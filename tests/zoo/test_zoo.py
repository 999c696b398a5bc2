"""Two tiny architectures of transformers, split -> what one device computes. `python -m tests.zoo` takes them all."""
from __future__ import annotations

import pytest

from tests.scripts.fuzz_ranks import Ranks
from tests.zoo.judge import Result, judged


@pytest.mark.timeout(120)
def test_two_architectures(tmp_path):
    ranks = Ranks(tmp_path, judged, limit_s=60)
    try:
        found = {case: ranks.judge(*case) for case in (("bert", "tp"), ("llama", "plan"))}
    finally:
        ranks.stop()
    assert {case: (outcome.verdict, outcome.detail) for case, outcome in found.items()} == dict.fromkeys(found, ("same", ""))
    planned = found["llama", "plan"]
    assert isinstance(planned, Result)
    assert planned.figures["planned"] == planned.figures["parameters"] > 0
