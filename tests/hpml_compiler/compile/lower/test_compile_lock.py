"""Processes that compile equal graphs at once -> each graph is compiled by one, and nobody waits for one that is gone."""
from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
from collections import Counter

import pytest
import torch

from hpml_compiler.compile.lower import compile_lock
from hpml_compiler.compile.lower.compile_lock import CompileJob, Prefetch, compile_in_order
from passes import compat
from tests.hpml_compiler.compile.lower.test_regional_compile import Deep
from tests.hpml_compiler.runtime.common import full

A, B = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compat, "inductor_cache_folder", lambda: str(tmp_path))
    return tmp_path


def test_others_do_what_is_next_and_then_find_what_is_done():
    compiled: Counter[str] = Counter()
    found: list[list[int]] = []
    together, both = threading.Barrier(2), threading.Barrier(2)

    def job(name: str, number: int) -> CompileJob[int]:
        def compile_or_find() -> int:
            if name not in compiled:
                both.wait(timeout=60)  # neither is done before the other has begun
                compiled[name] += 1
            return number
        return CompileJob(name, compile_or_find)

    def rank() -> None:
        together.wait()
        found.append([call for _, call in compile_in_order([job(A, 1)], Prefetch(lambda: [job(B, 2)]))] + [
            call for _, call in compile_in_order([job(B, 2)])])

    ranks = [threading.Thread(target=rank) for _ in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == [[1, 2], [1, 2]] and compiled == {A: 1, B: 1}


def test_of_several_those_come_first_that_nobody_is_at():
    at_it, order = threading.Event(), []

    def slow() -> str:
        at_it.set()
        while len(order) < 2:
            time.sleep(0.01)
        return "slow"

    other = threading.Thread(target=lambda: list(compile_in_order([CompileJob(A, slow)])))
    other.start()
    at_it.wait()
    jobs = [CompileJob(A, lambda: order.append("a")), CompileJob(B, lambda: order.append("b")),
            CompileJob(None, lambda: order.append("-"))]
    assert [number for number, _ in compile_in_order(jobs)] == [1, 2, 0] and order == ["b", "-", "a"]
    other.join()


def compile_for_ever(folder: str, begun) -> None:
    compat.inductor_cache_folder = lambda: folder
    list(compile_in_order([CompileJob(A, lambda: begun.set() or time.sleep(100))]))


def test_nobody_waits_for_a_process_that_was_killed(folder):
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=compile_for_ever, args=(str(folder), begun))
    process.start()
    assert begun.wait(60)
    threading.Timer(0.5, process.kill).start()
    began = time.monotonic()
    assert list(compile_in_order([CompileJob(A, lambda: 1)])) == [(0, 1)]
    assert 0.3 < time.monotonic() - began < 10
    process.join()


def test_an_error_gives_the_turn_to_the_next(folder):
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(compile_in_order([CompileJob(A, fail)]))
    assert list(compile_in_order([CompileJob(A, lambda: 1)])) == [(0, 1)]


@pytest.mark.parametrize("why", ["nothing is kept", "the folder cannot be made", "the file cannot be locked"])
def test_where_there_are_no_locks_all_is_compiled_at_once(folder, monkeypatch, why):
    if why == "nothing is kept":
        monkeypatch.setattr(compat, "inductor_cache_folder", lambda: None)
    elif why == "the folder cannot be made":
        (folder / compile_lock.FOLDER).write_text("")
    else:
        monkeypatch.setattr(compile_lock, "LOCKS", 1)
        (folder / compile_lock.FOLDER / "0.lock").mkdir(parents=True)
    assert list(compile_in_order([CompileJob(A, lambda: 1), CompileJob(B, lambda: 2)])) == [(0, 1), (1, 2)]


def train(rank: int, folder: str, blocks: str) -> tuple[list[str], int]:
    """What this rank compiled, by inductor's names for graphs, and how many graphs it found."""
    from torch._inductor.codecache import FxGraphCache

    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, HPML_QUICK_PROFILE="0")
    compiled, save = [], FxGraphCache._save_graph
    FxGraphCache._save_graph = lambda key, *args, **kwargs: compiled.append(key) or save(key, *args, **kwargs)
    torch.manual_seed(0)
    plain = Deep()
    model, x = copy.deepcopy(plain), torch.linspace(-1, 1, 8 * 16).view(8, 16)
    loss = torch.compile(model, backend="hpml", options={"mesh": {"dp": 2}, "compile_blocks": blocks, "zero": 3})(x)
    loss.backward()
    wanted = plain(x)
    wanted.backward()
    for mine, theirs in zip((loss, *(p.grad for p in model.parameters())), (wanted, *(p.grad for p in plain.parameters()))):
        torch.testing.assert_close(full(mine), theirs)
    return compiled, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("blocks", ["off", "on"])
def test_two_ranks_compile_no_graph_twice(launch, tmp_path, blocks):
    (mine, found), (others, found_too) = launch(train, args=(str(tmp_path / "inductor"), blocks), timeout_s=220)
    assert mine and others, "both were at work"
    assert len({*mine, *others}) == len(mine) + len(others) and found + found_too >= 1
