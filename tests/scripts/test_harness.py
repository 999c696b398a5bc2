"""Uses that fail on purpose -> each is reported, and later ones still run."""
from __future__ import annotations

import re

import pytest

from tests.scripts.launch import outcomes
from tests.scripts.use import find, uses_of
from tests.scripts.verdict import complaint

TOLD = {
    "differs": ("different", r"seen.returned\[0\]: off by"),
    "ranks_differ": ("different", "the ranks differ from each other"),
    "never_compiled": ("different", "0 graphs came to the backend"),
    "draws_another_number": ("different", "generator"),
    "raises": ("crashed", "nobody expects this"),
    "is_refused": ("refused", r"(?s)mesh.*next step"),
    "hangs_on_one_rank": ("crashed", r"(?s)not every rank came to an end.*time.sleep|hangs_on_one_rank"),
    "dies_on_one_rank": ("crashed", "(?s)not every rank.*exit code 7"),
}


@pytest.mark.timeout(240)
def test_what_goes_wrong_is_told(tmp_path):
    names = [use.name for use in uses_of("wrong_uses")]
    found = outcomes(tmp_path, [(name, "dp") for name in [*names, "wrong_uses.right"]])
    for name in names:
        outcome, told = found[name, "dp"], TOLD.get(name.split(".")[1])
        verdict, words = told or ("same", "")
        assert outcome.verdict == verdict, (name, outcome)
        assert re.search(words, outcome.detail), (name, outcome.detail)
        assert (complaint(find(name), "dp", outcome) is None) == (name == "wrong_uses.right")
