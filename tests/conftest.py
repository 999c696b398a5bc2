"""Fixtures and skips that every test may use."""
from __future__ import annotations

import functools
import os

import pytest
import torch
from hypothesis import settings

from tests.helpers.ranks import run_ranks

# Plans of tests are the same each time, and their launches start fast; the tests of the quick look itself ask for it.
os.environ.setdefault("HPML_QUICK_PROFILE", "0")
# And none is that of an earlier test; the tests of remembered plans ask for it.
os.environ.setdefault("HPML_CACHE", "0")

settings.register_profile("tests", deadline=None)  # on a busy machine the first example alone takes longer than 200 ms
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def launch(tmp_path):
    """`launch(fn, world_size=2, args=(), timeout_s=100, init=True, check=True)`: see `tests.helpers.ranks.run_ranks`."""
    return functools.partial(run_ranks, tmp_path)
