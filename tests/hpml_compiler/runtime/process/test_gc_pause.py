"""Thresholds of the garbage collector inside of a context, and after it."""
from __future__ import annotations

import gc

import pytest

from hpml_compiler.runtime.process.gc_pause import SELDOM, gc_paused


@pytest.mark.parametrize(("given", "inside"), [
    ((700, 10, 10), SELDOM), ((10**6, 10, 10), (10**6, *SELDOM[1:])), ((0, 10, 10), (0, 10, 10))])
def test_garbage_is_looked_for_as_seldom_as_wanted_until_the_end(given, inside):
    before = gc.get_threshold()
    gc.set_threshold(*given)
    try:
        with pytest.raises(KeyError), gc_paused():
            assert gc.get_threshold() == inside
            raise KeyError
        assert gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)
