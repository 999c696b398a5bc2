from __future__ import annotations

import logging
import threading

import pytest
import torch
from packaging.version import Version

from passes.compat.patching import patches
from passes.compat.patching.patches import PATCHES, Patch, replace_for_good, replaced

MODULE = __name__


def add(a, b):
    return a + b


def sub(a, b):
    return a - b


class Operator:
    kernels = {"cpu": add}
    found = {"x": 1}


@pytest.fixture
def table(monkeypatch):
    """A table of functions of this module, one of which has other parameters than the table says."""
    known = Patch(f"{MODULE}:add", ("a", "b"), "for the test", "nothing is lost")
    changed = Patch(f"{MODULE}:sub", ("left", "right"), "for the test", "differences are plain")
    gone = Patch(f"{MODULE}:mul", ("a",), "for the test", "products are plain")
    kernels = Patch(f"{MODULE}:Operator.kernels", ("a", "b"), "for the test", "nothing is lost", cache="found")
    others = Patch(f"{MODULE}:Operator.kernels", ("a", "c"), "for the test", "kernels are plain", called="others")
    cached = Patch(f"{MODULE}:Operator.kernels", (), "for the test", "caches are plain", cache="lost", called="cached")
    made = Patch("torch.distributed:TCPStore", ("host_name", "ports"), "for the test", "stores are plain", called="made")
    table = (known, changed, gone, kernels, others, cached, made)
    monkeypatch.setattr(patches, "PATCHES", {patch.name: patch for patch in table})
    patches._can_be_replaced.cache_clear()
    yield
    patches._can_be_replaced.cache_clear()


@pytest.mark.parametrize("patch", PATCHES.values(), ids=list(PATCHES))
def test_this_torch_is_as_the_table_says(patch):
    first, last = map(Version, patch.seen)
    pytest.importorskip(patch.target.partition(":")[0].partition(".")[0])
    if first <= Version(".".join(torch.__version__.split(".")[:2])) <= last:
        assert patch.probe() is None


def test_a_function_is_replaced_inside_of_the_context_alone(table):
    with replaced({"add": lambda before: lambda a, b: 10 * before(a, b)}) as can:
        assert can and add(1, 2) == 30
    assert add(1, 2) == 3


def test_it_is_restored_after_an_error(table):
    with pytest.raises(ZeroDivisionError), replaced({"add": lambda _: None}):
        raise ZeroDivisionError
    assert add(1, 2) == 3


def test_contexts_nest(table):
    with (replaced({"add": lambda before: lambda a, b: before(a, b) + 1}),
          replaced({"add": lambda before: lambda a, b: 2 * before(a, b)})):
        assert add(1, 2) == 8
    assert add(1, 2) == 3


def test_a_table_of_functions_is_replaced_and_a_cache_beside_it_emptied(table):
    with replaced({"Operator.kernels": lambda before: {**before, "cpu": sub}}) as can:
        assert can and Operator.kernels == {"cpu": sub} and not Operator.found
        Operator.found["y"] = 2
    assert Operator.kernels == {"cpu": add} and not Operator.found


@pytest.mark.parametrize(("name", "without"), [
    ("sub", "differences are plain"), ("mul", "products are plain"), ("others", "kernels are plain"),
    ("cached", "caches are plain"), ("made", "stores are plain")])
def test_what_the_probe_does_not_know_is_left_and_said_once(table, caplog, name, without):
    with caplog.at_level(logging.WARNING, "hpml"):
        for _ in range(2):
            with replaced({"add": lambda _: None, name: lambda _: None}) as can:
                assert not can and add(1, 2) == 3 and sub(3, 2) == 1
        assert not replace_for_good({name: lambda _: None})
    (message,) = caplog.messages
    assert patches.PATCHES[name].target.replace(":", ".") in message and without in message


def test_other_threads_wait(table):
    inside = []

    def other():
        with replaced({"add": lambda _: lambda a, b: -1}):
            inside.append(add(1, 2))

    with replaced({"add": lambda _: lambda a, b: 0}):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert not inside and add(1, 2) == 0
    thread.join(10)
    assert inside == [-1] and add(1, 2) == 3
