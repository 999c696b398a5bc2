"""A few combinations of options on two ranks: one device's numbers. `python -m tests.combinations` tries all pairs."""
from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.combinations.covering import covering, pairs_of
from tests.combinations.judge import judged
from tests.combinations.space import chosen_of, is_meant, refusal, values

SAMPLE = 3


def cases() -> list[str]:
    found = covering(values(2), lambda each: is_meant(chosen_of(each, 2)) and refusal(chosen_of(each, 2)) is None)
    return [json.dumps(chosen_of(each, 2), sort_keys=True) for each in found[::max(len(found) // SAMPLE, 1)][:SAMPLE]]


def test_every_pair_of_values_is_covered():
    small = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1]}
    found = covering(small, lambda each: (each["a"], each["b"]) != (2, 1))
    pairs = set().union(*map(pairs_of, found))
    everything = {pair for one, other in itertools.combinations(small, 2)
                  for pair in itertools.product(((one, k) for k in small[one]), ((other, k) for k in small[other]))}
    assert everything - pairs == {(("a", 2), ("b", 1))}


def on_rank(rank: int, cases: list[str], folder: str):
    return [judged(text, False, rank, Path(folder)) for text in cases]


@pytest.mark.timeout(110)
def test_combined_options_give_one_devices_numbers(launch, tmp_path):
    asked = cases()
    for rank in launch(on_rank, 2, (asked, str(tmp_path)), timeout_s=100):
        for text, outcome in zip(asked, rank, strict=True):
            assert outcome.verdict in ("same", "refused"), f"{text}: {outcome.detail}"
