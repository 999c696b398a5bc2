"""Fixtures and skips that every test may use."""
from __future__ import annotations

import functools
import os
from collections import Counter

import pytest
import torch
from hypothesis import settings

from tests.helpers.frozen import freeze
from tests.helpers.ranks import run_ranks

# Plans of tests are the same each time, and their launches start fast; the tests of the quick look itself ask for it.
os.environ.setdefault("HPML_QUICK_PROFILE", "0")
# And none is that of an earlier test; the tests of remembered plans ask for it.
os.environ.setdefault("HPML_CACHE", "0")

settings.register_profile("tests", deadline=None)  # on a busy machine the first example alone takes longer than 200 ms
settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        in_order_of_work(items, usual_s=float(config.getini("timeout")) / 2)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords have the names of folders, too
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported is not looked through for garbage before each graph; see `tests.helpers.frozen`."""
    freeze()


def in_order_of_work(items: list[pytest.Item], usual_s: float) -> None:
    """Files with tests that may take long first, then those of many tests: what comes last ends on all workers at once."""
    def is_long(item: pytest.Item) -> bool:
        limit = item.get_closest_marker("timeout")
        return item.get_closest_marker("slow") is not None or limit is not None and limit.args[0] > usual_s

    long, tests = {item.path for item in items if is_long(item)}, Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in long, -tests[item.path], item.path))


@pytest.fixture
def launch(tmp_path):
    """`launch(fn, world_size=2, args=(), timeout_s=200, init=True, check=True)`: see `tests.helpers.ranks.run_ranks`."""
    return functools.partial(run_ranks, tmp_path)
