"""A script launched again -> its graphs are neither traced nor planned, and it computes the same; another script's are."""
from __future__ import annotations

import logging
import os
import resource
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.compile.cache import graph_cache
from hpml_compiler.compile.cache.stub_graph import stub_of
from hpml_compiler.plans.cache import graph_database, plan_database
from hpml_compiler.session import session
from tests.helpers.frozen import fresh
from tests.helpers.ranks import run_ranks

FOUND = "read from the graph cache"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HPML_CACHE", "1")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def first_launch(fn: Any, args: tuple, folder: Any) -> list[Any]:
    """For several tests: it leaves what it keeps in `folder`/cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPML_CACHE", "1")
        patch.setenv("HPML_CACHE_DIR", str(folder / "cache"))
        return run_ranks(folder, fn, args=args)


class Blocks(nn.Module):
    """Two blocks with dropout, tied ends, and an output besides the loss."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(2))
        self.factor = factor

    def forward(self, ids, y):
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h) * self.factor
        logits = h @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits, h.transpose(0, 1)


def train(rank: int, options: dict[str, Any], factor: float = 1.0, rows: int = 8):
    """Two steps, a step of fewer rows, an evaluation -> numbers, what the log said, seconds of each graph, and the plan."""
    fresh()
    said = listen()
    torch.manual_seed(0)
    model = Blocks(factor)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(8 * 6).view(8, 6) % 32
    seen = []
    for k in (rows, rows, 4):
        loss, logits, last = call(ids[:k], ids[:k].flip(1))
        (loss + logits.square().mean() + last.sum(0).square().mean()).backward()
        seen += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss, logits, _ = call(ids[:4], ids[:4])
    seen += [float(loss), float(logits.sum()), float(torch.rand(()))]
    plan = hpml_compiler.last_plan().model_dump()
    seconds = [list(graph.pop("seconds")) for graph in plan["graphs"]]
    return seen, [each for each in said if FOUND in each], said, seconds, plan


def trained(rank: int, *cases: tuple):
    """A launch: one training after another, as if each were the only one."""
    return [train(rank, *case) for case in cases]


ROWS = {"mesh": {"dp": 2}}


def small(rank: int, options: dict[str, Any] = ROWS, factor: float = 1.0, rows: int = 8, amp: bool = False):
    """A step and an evaluation -> numbers, which graphs were found, and what the log said. For what is the same for all
    graphs, as what happens to their file is."""
    fresh()
    said = listen()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4), Times(factor))
    call, x = torch.compile(model, backend="hpml", options={"compiler": "eager", **options}), torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        out = call(x[:rows])
        out.square().mean().backward()
        seen = [float(out.detach().sum()), float(full(model[0].weight.grad).sum())]
        model.eval()
        with torch.no_grad():
            seen.append(float(call(x[:4]).sum()))
    return [*seen, float(torch.rand(()))], [each for each in said if FOUND in each], [*said]


class Times(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def smalls(rank: int, *cases: tuple):
    return [small(rank, *case) for case in cases]


@pytest.fixture(scope="module")
def first_small(tmp_path_factory):
    """What a first launch of `small` gives, and the folder of its cache."""
    folder = tmp_path_factory.mktemp("small")
    return first_launch(small, (), folder), folder / "cache"


@pytest.fixture
def first(first_small, folder):
    """What it gave; what it kept is there."""
    results, kept = first_small
    shutil.copytree(kept, folder)
    return results


SAME = {  # where all steps have four rows, these are two graphs
    "nothing said": ({},), "columns": ({"mesh": {"tp": 2}}, 1.0, 4), "zero 2": ({"zero": 2}, 1.0, 4),
}
OTHER = {
    "a constant of the model": (ROWS, 0.5), "another mesh": ({"mesh": {"tp": 2}},),
    "another option": ({**ROWS, "zero": 3},), "another batch": (ROWS, 1.0, 6), "autocast": (ROWS, 1.0, 8, True),
}


@pytest.mark.timeout(300)
def test_a_second_launch_computes_the_same_and_decides_nothing(launch):
    """And its plan, with what follows from it, is that of the first one."""
    first, again = (launch(trained, args=(*SAME.values(),), timeout_s=150) for _ in range(2))
    for rank in range(2):
        assert [case[0] for case in again[rank]] == [case[0] for case in first[rank]]
    for name, (_, nothing, _, before, planned), (_, found, _, seconds, plan) in zip(SAME, first[0], again[0], strict=True):
        assert plan == planned, name
        assert not nothing and len(found) == len(seconds) == (3 if name == "nothing said" else 2), name
        assert all("restore" in graph and not {"solve", "annotate", "rewrite"} & set(graph) for graph in seconds), name
        assert all("solve" in graph for graph in before), name


@pytest.mark.timeout(300)
def test_with_inductor_all_that_was_compiled_is_found(launch, monkeypatch, tmp_path):
    """Also where equal blocks are compiled once: their modules are told apart by all that is in them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    first, again = (launch(compiled, timeout_s=140)[0] for _ in range(2))
    for (before, *_), (after, hits, misses, found) in zip(first, again, strict=True):
        assert after == before and found == 2 and hits > 0 and not misses


def compiled(rank: int):
    from torch._dynamo.utils import counters

    results, counted = [], counters["inductor"]
    for options in ({}, {"compile_blocks": "on"}):
        counted.clear()
        seen, found, *_ = train(rank, {"compiler": "inductor", **options}, rows=4)
        results.append((seen, counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], len(found)))
    return results


def test_what_is_another_graph_or_is_asked_for_otherwise_is_planned_anew(launch, first):
    cases, _ = launch(smalls, args=(*OTHER.values(),))
    for name, (_, found, _) in zip(OTHER, cases, strict=True):
        assert not found, name


class Counted(nn.Module):
    """A layer norm by the batch, an average of activations, a count of calls and least values: forward changes them all."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("least", torch.ones(2, 8))

    def forward(self, x, y):
        h = self.first(x)
        if self.training:
            self.steps.add_(1)
            with torch.no_grad():
                self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.least[0].copy_(torch.minimum(self.least[0], h.detach().amin(0)))
        h = self.last(F.gelu(self.norm(h)) + self.seen)
        return F.cross_entropy(h, y), h


def count(rank: int, options: dict[str, Any] | None):
    """A launch: trainings by two batch sizes, evaluations -> losses, the state after each, what the log said. No options: one
    device, without a compiler."""
    fresh()
    said = listen()
    torch.manual_seed(0)
    model = Counted().double()
    call: Any = model if options is None else torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 6, dtype=torch.float64)
    losses, states = [], []
    for rows in (8, 8, 4, 8):
        loss, h = call(x[:rows], torch.arange(rows) % 3)
        (loss + h.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        states.append(hpml_compiler.full_state_dict(model) if options is not None else model.state_dict())
        states[-1] = {name: value.clone() for name, value in states[-1].items()}
    model.eval()
    with torch.no_grad():
        losses.append(call(x[:4], torch.arange(4) % 3)[0])
    model.train()
    with torch.no_grad():  # its buffers change, and nothing is differentiated
        losses.append(call(x[:4], torch.arange(4) % 3)[0])
    states.append({name: value.clone() for name, value in model.named_buffers()})
    return losses, states, [each for each in said if FOUND in each], [*said]


def listen() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hpml").addHandler(handler)
    logging.getLogger("hpml").setLevel(logging.INFO)
    return said


class Moved(nn.Module):
    """A frozen matrix that some calls change, as they do what they are given."""

    def __init__(self):
        super().__init__()
        self.frozen, self.last = nn.Linear(64, 256, bias=False).requires_grad_(False), nn.Linear(256, 3)

    def forward(self, x, y, moves: bool):
        if moves:
            x.mul_(0.5)
            with torch.no_grad():
                self.frozen.weight.mul_(0.9)
        return F.cross_entropy(self.last(self.frozen(x).relu()), y)


def full(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def move(rank: int, options: dict[str, Any] | None):
    fresh()
    said = listen()
    torch.manual_seed(0)
    model = Moved().double()
    data = [(x, torch.arange(8) % 3) for x in torch.randn(4, 8, 64, dtype=torch.float64)]
    if options is None:
        call: Any = model
        loader: Any = torch.utils.data.DataLoader(data, batch_size=None)
    else:
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
        loader = hpml_compiler.distribute(torch.utils.data.DataLoader(data, batch_size=None))
    losses, states, given = [], [], []
    for k, (x, y) in enumerate(loader):
        loss = call(x, y, k in (1, 2))
        loss.backward()
        losses.append(loss.detach())
        given.append(full(x))
        states.append(full(model.frozen.weight))
    assert options is None or model.frozen.weight.placements[0].is_shard()
    return losses, states, given, [each for each in said if FOUND in each], [*said]


class Changes(nn.Module):
    """Forward changes something in a way that is named."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.last, memory = way, nn.Linear(4, 4), torch.ones(8)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("low", memory[:4] if way != "overlapping" else memory[:6])
        self.register_buffer("high", memory[4:] if way != "overlapping" else memory[2:])
        if way == "power iterations":
            nn.utils.parametrizations.spectral_norm(self.last)

    def forward(self, x):
        part = None
        if self.way == "a parameter":
            with torch.no_grad():
                self.last.weight.mul_(0.9)
        h = self.last(x)
        if self.way == "by gradients":
            self.mean.lerp_(h.mean(0), 0.1)
            h = h + self.mean
        elif self.way in ("side by side", "overlapping"):
            self.low.add_(1)
            h = h * self.high.mean()
        elif self.way == "beside a view":
            self.mean.add_(1)
            part = x[2:4]
        return h.square().mean(), part


GRADIENTS, ALIASES = "it changes an input that gradients flow into", "its results share memory with others"
LONG_WAY = {
    "a parameter": GRADIENTS,
    "by gradients": GRADIENTS,
    "side by side": "it mutates an input that shares memory with another input",
    "overlapping": "it changes an input, and is traced with other inputs than its own",
    "beside a view": ALIASES,
    "power iterations": ALIASES,
}


def change(rank: int):
    fresh()
    said, seen = listen(), []
    for way in LONG_WAY:
        torch.manual_seed(0)
        said.append(way)
        model = Changes(way)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"dp": 2}})
        loss, part = call(torch.randn(8, 4))
        loss.backward()
        seen += [loss.detach(), part, *(value.detach().clone() for value in model.buffers())]
    said = [each for each in said if each in LONG_WAY or FOUND in each or "not cached" in each]
    return [x for x in seen if x is not None], said


def write(rank: int):
    """A launch: all graphs that change what they are given."""
    return {"rows": count(rank, ROWS), "zero 3": count(rank, {"zero": 3}), "moved": move(rank, {"mesh": {"tp": 2}}),
            "the long way": change(rank)}


@pytest.fixture(scope="module")
def first_that_writes(tmp_path_factory):
    """What a first launch of `write` gives, and the folder of its cache."""
    folder = tmp_path_factory.mktemp("writes")
    return first_launch(write, (), folder), folder / "cache"


@pytest.mark.timeout(240)
def test_graphs_that_change_what_they_are_given_are_kept(launch, first_that_writes, folder):
    """Buffers, placed parameters, and rows of a batch; what a copy does not say goes the long way."""
    first, kept = first_that_writes
    shutil.copytree(kept, folder)
    again = launch(write)
    for name, many, found in (("rows", 2, 4), ("zero 3", 2, 4), ("moved", 3, 2)):
        (*_, before, said), (*_, after, _) = (each[0][name] for each in (first, again))
        assert not before and len(after) == found, said
        assert not any("is not cached" in each for each in said)
        for rank in range(2):
            assert_same(again[rank][name][:many], first[rank][name][:many])
        alone = move(0, None) if name == "moved" else count(0, None)
        torch.testing.assert_close(again[0][name][:many], alone[:many])
    assert_same(again[0]["the long way"][0], first[0]["the long way"][0])
    for each in (first, again):
        said = each[0]["the long way"][1]
        assert len(said) == 2 * len(LONG_WAY)
        for way, line in zip(said[::2], said[1::2], strict=True):
            assert f"is not cached: {LONG_WAY[way]}" in line


def with_other_stand_ins(rank: int):
    """As if the stand-in for a graph that changes inputs were traced otherwise than the graph was, in each of three ways."""
    for changed in range(3):
        def other(gm, results, written, changed=changed):
            one, *rest = written
            return stub_of(gm, results, [[replace(one, without_gradients=not one.without_gradients), *rest], rest,
                                         [replace(one, position=0), *rest]][changed])

        graph_cache.stub_of = other  # type: ignore[assignment]
        with pytest.raises(Exception, match="the graph differs from its entry in the graph cache"):
            count(rank, ROWS)


def test_what_is_not_traced_as_it_was_is_an_error(launch, first_that_writes, folder):
    shutil.copytree(first_that_writes[1], folder)
    launch(with_other_stand_ins)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_ranks_of_which_one_has_nothing_all_go_the_long_way(launch, first, folder):
    with sqlite3.connect(folder / "graphs.sqlite") as connection:
        connection.execute("DELETE FROM graph WHERE key LIKE '% 1'")
    ranks = launch(smalls, args=((), ()))
    for (seen, *_), (again, then) in zip(first, ranks, strict=True):
        assert again[0] == then[0] == seen and not again[1]
    assert len(ranks[0][1][1]) == 2, "what was missing is there again"


def test_a_damaged_entry_costs_a_word_and_is_replaced(launch, first, folder):
    with sqlite3.connect(folder / "graphs.sqlite") as connection:
        connection.execute("UPDATE graph SET entry = substr(entry, 1, 100)")
    ranks = launch(smalls, args=((), ()))
    assert [again[0] for again, _ in ranks] == [seen for seen, *_ in first]
    (_, found, said), (_, then, _) = ranks[0]
    assert not found and any("damaged" in each for each in said)
    assert len(then) == 2


def killed_while_compiling(rank: int):
    from hpml_compiler.compile.lower.lowering import Lowering

    def backward(self, gm, inputs):
        os._exit(9)
    if rank:
        Lowering.backward = backward  # type: ignore[method-assign]
    dist.barrier()
    return small(rank)


def test_a_launch_that_was_killed_while_it_compiled_leaves_nothing_wrong(launch, first_small):
    """Neither for the next one nor for the one after it."""
    launch(killed_while_compiling, check=False, timeout_s=60)
    ranks = launch(smalls, args=((), ()))
    for (seen, *_), (again, then) in zip(first_small[0], ranks, strict=True):
        assert again[0] == then[0] == seen
    assert len(ranks[0][1][1]) == 2


def small_on_a_full_disk(rank: int, full: tuple[int, ...], most_bytes: int):
    """Files that these ranks write cannot become larger than that, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        return small(rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def smalls_in(rank: int, folders: dict[str, tuple[str, tuple[int, ...], int]]):
    """Results by case. folders: cache folder of each ("": without the cache), ranks with a full disk, bytes left on it."""
    found = {}
    for name, (folder, full, most_bytes) in folders.items():
        session.current().close()  # what is said once is said again
        os.environ |= {"HPML_CACHE": "1" if folder else "0", "HPML_CACHE_DIR": folder}
        found[name] = small_on_a_full_disk(rank, full, most_bytes)
    return found


def test_a_folder_that_cannot_be_used_costs_a_word(launch, first_small, folder, tmp_path):
    """Each case has a folder of its own. A full disk has no room for one page of SQLite: with more, it depends on what
    the other rank wrote before."""
    results, kept = first_small
    shutil.copytree(kept, tmp_path / "damaged")
    for file in (tmp_path / "damaged").glob("graphs.sqlite-*"):
        file.unlink()
    (tmp_path / "damaged" / "graphs.sqlite").write_bytes(b"nothing of that kind" * 1000)
    (tmp_path / "file").write_text("")
    folders = {"no room": (f"{tmp_path}/1", (0, 1), 4000), "no room for rank 1": (f"{tmp_path}/2", (1,), 4000),
               "damaged": (f"{tmp_path}/damaged", (), 0), "in a file": (f"{tmp_path}/file/cache", (), 0), "none": ("", (), 0)}
    for rank, found in enumerate(launch(smalls_in, args=(folders,))):
        assert all(seen == results[rank][0] and not hits for seen, hits, _ in found.values())
        for name, (_, full, _) in folders.items():
            words = [each for each in found[name][2] if "cannot be cached" in each]
            assert bool(words) == (rank in full) or name in ("damaged", "in a file"), name
            assert not full or all("set HPML_CACHE_DIR to a folder on a local disk" in each for each in words)
        if rank == 0:
            assert any("the graph cache cannot be read" in each for each in found["damaged"][2])
            assert any("cannot be cached" in each for each in found["in a file"][2])
    assert not folder.exists()


def test_jobs_that_share_a_folder_do_not_disturb_each_other(launch, first_small):
    """Nor does one that forgets what is there meanwhile."""
    cases = [(ROWS,), (ROWS,), ({"mesh": {"tp": 2}},)]
    with ThreadPoolExecutor() as at_once:
        jobs = [at_once.submit(launch, smalls, args=(case,) * 3, timeout_s=110) for case in cases]
        while not all(job.done() for job in jobs):
            time.sleep(0.2)
            plan_database.clear()
            graph_database.clear()
        found = [[[each[0] for each in rank] for rank in job.result()] for job in jobs]
    rows, columns = ([each[0] for each in ranks] for ranks in (first_small[0], launch(small, args=cases[2])))
    assert found == [[[seen] * 3 for seen in each] for each in (rows, rows, columns)]
