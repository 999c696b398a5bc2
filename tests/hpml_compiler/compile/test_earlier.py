"""A script launched again -> its graphs are neither traced nor planned, and it computes the same; another script's are."""
from __future__ import annotations

import logging
import os
import sqlite3
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hpml_compiler

FOUND = "rewritten as in an earlier launch"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HPML_CACHE", "1")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Blocks(nn.Module):
    """Two blocks with dropout, tied ends, and an output besides the loss."""

    def __init__(self, factor: float = 1.0, norm: bool = False):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(2))
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.factor = factor

    def forward(self, ids, y):
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h) * self.factor
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        logits = h @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits, h.transpose(0, 1)


def train(rank: int, options: dict[str, Any], factor: float = 1.0, norm: bool = False, rows: int = 8, amp: bool = False):
    """A launch: two steps, a step of fewer rows, an evaluation -> numbers, what the log said, and seconds of each graph."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hpml").addHandler(handler)
    logging.getLogger("hpml").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = Blocks(factor, norm)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(8 * 6).view(8, 6) % 32
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
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
    return seen, [each for each in said if FOUND in each], said, [list(g.seconds) for g in hpml_compiler.last_plan().graphs]


def twice(launch, *args) -> tuple[Any, Any]:
    first, again = launch(train, args=args), launch(train, args=args)
    assert not first[0][1], "there was nothing to be found"
    assert [each[0] for each in again] == [each[0] for each in first]
    return first[0], again[0]


@pytest.mark.parametrize("options", [
    {"mesh": {"dp": 2}}, {"mesh": {"tp": 2}}, {"zero": 3}, {"zero": 2},
])
def test_a_second_launch_computes_the_same_and_decides_nothing(options, launch):
    (_, _, _, before), (_, found, _, seconds) = twice(launch, options)
    assert len(found) == len(seconds) == 3
    for graph in seconds:
        assert "restore" in graph and not {"solve", "annotate", "rewrite"} & set(graph)
    assert all("solve" in graph for graph in before)


@pytest.mark.timeout(240)
def test_with_inductor_all_that_was_compiled_is_found(launch, monkeypatch, tmp_path):
    """Also where equal blocks are compiled once: their modules are told apart by all that is in them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for options in ({"compiler": "inductor"}, {"compiler": "inductor", "compile_blocks": "on"}):
        (first, *_), *_ = launch(compiled, args=(options,))
        (again, hits, misses, found), *_ = launch(compiled, args=(options,))
        assert again == first and found == 3 and hits > 0 and not misses


def compiled(rank: int, options: dict[str, Any]):
    from torch._dynamo.utils import counters

    seen, found, _, _ = train(rank, options)
    return seen, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], len(found)


@pytest.mark.parametrize("other", [
    ({"mesh": {"dp": 2}}, 0.5), ({"mesh": {"tp": 2}}, 1.0), ({"mesh": {"dp": 2}, "zero": 3}, 1.0),
    ({"mesh": {"dp": 2}}, 1.0, False, 6), ({"mesh": {"dp": 2}}, 1.0, False, 8, True),
], ids=["a constant of the model", "another mesh", "another option", "another batch", "autocast"])
def test_what_is_another_graph_or_is_asked_for_otherwise_is_planned_anew(other, launch):
    launch(train, args=({"mesh": {"dp": 2}}, 1.0))
    (_, found, _, _), *_ = launch(train, args=other)
    assert not found


def test_a_plan_and_what_follows_from_it_are_those_of_the_first_launch(launch):
    (one, *_), (two, *_) = (launch(planned) for _ in range(2))
    for each in (one, two):
        for graph in each["graphs"]:
            del graph["seconds"]
    assert one == two


def planned(rank: int):
    train(rank, {})
    return hpml_compiler.last_plan().model_dump()


def test_changed_buffers_and_the_graphs_after_them_go_the_long_way(launch):
    (first, _, said, _), (_, found, _, _) = twice(launch, {"mesh": {"dp": 2}}, 1.0, True)
    assert sum("is not kept for the next launch: it changes what it is given" in each for each in said) == 2
    assert len(found) == 1, "the evaluation changes nothing"
    assert first


def entries(folder) -> list[tuple]:
    with sqlite3.connect(folder / "graphs.sqlite") as connection:
        return connection.execute("SELECT key, digest, entry FROM graph").fetchall()


def test_ranks_of_which_one_has_nothing_all_go_the_long_way(launch, folder):
    first = launch(train, args=({"mesh": {"dp": 2}},))
    with sqlite3.connect(folder / "graphs.sqlite") as connection:
        connection.execute("DELETE FROM graph WHERE key LIKE '% 1'")
    again = launch(train, args=({"mesh": {"dp": 2}},))
    assert [each[0] for each in again] == [each[0] for each in first] and not again[0][1] and not again[1][1]
    assert len(launch(train, args=({"mesh": {"dp": 2}},))[0][1]) == 3, "what was missing is there again"


def test_a_damaged_entry_costs_a_word_and_is_replaced(launch, folder):
    first = launch(train, args=({"mesh": {"dp": 2}},))
    with sqlite3.connect(folder / "graphs.sqlite") as connection:
        connection.execute("UPDATE graph SET entry = substr(entry, 1, 100)")
    again = launch(train, args=({"mesh": {"dp": 2}},))
    assert [each[0] for each in again] == [each[0] for each in first]
    assert not again[0][1] and any("damaged" in each for each in again[0][2])
    assert len(launch(train, args=({"mesh": {"dp": 2}},))[0][1]) == 3


def test_a_damaged_file_costs_a_word(launch, folder):
    first = launch(train, args=({"mesh": {"dp": 2}},))
    (folder / "graphs.sqlite").write_bytes(b"nothing of that kind" * 1000)
    for end in ("-wal", "-shm"):
        (folder / f"graphs.sqlite{end}").unlink(missing_ok=True)
    again = launch(train, args=({"mesh": {"dp": 2}},))
    assert [each[0] for each in again] == [each[0] for each in first]
    assert any("what earlier launches made of graphs cannot be read" in each for each in again[0][2])


def test_a_folder_that_cannot_be_written_costs_a_word(launch, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (_, _, said, _), *_ = launch(train, args=({"mesh": {"dp": 2}},))
    assert any("cannot be kept for the next launch" in each for each in said)


def killed_while_compiling(rank: int):
    from hpml_compiler.compile.lowering import Lowering

    def backward(self, gm, inputs):
        os._exit(9)
    if rank:
        Lowering.backward = backward  # type: ignore[method-assign]
    dist.barrier()
    return train(rank, {"mesh": {"dp": 2}})


def test_a_launch_that_was_killed_while_it_compiled_leaves_nothing_wrong(launch):
    launch(killed_while_compiling, check=False, timeout_s=60)
    first = launch(train, args=({"mesh": {"dp": 2}},))
    again = launch(train, args=({"mesh": {"dp": 2}},))
    assert [each[0] for each in again] == [each[0] for each in first] and len(again[0][1]) == 3


def test_without_the_cache_nothing_is_kept(launch, folder, monkeypatch):
    monkeypatch.setenv("HPML_CACHE", "0")
    (_, found, _, _), *_ = launch(train, args=({"mesh": {"dp": 2}},))
    assert not found and not folder.exists()
