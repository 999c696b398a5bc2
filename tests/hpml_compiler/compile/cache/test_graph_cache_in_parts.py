"""A script launched again whose graphs go through their batch in parts -> they are neither traced nor planned, and it computes
the same."""
from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.session import session
from tests.helpers.frozen import fresh
from tests.hpml_compiler.compile.cache.test_graph_cache import FOUND, assert_same, folder, full, listen

__all__ = ["folder"]  # a cache of its own for each test
SOLVED = {"solve", "annotate", "rewrite", "plan"}


class Deep(nn.Module):
    """Blocks with dropout, a buffer that forward changes, and the loss inside, or features for one that is outside."""

    def __init__(self, inside: bool = True, narrow: bool = False):
        super().__init__()
        self.inside, self.narrow = inside, narrow
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
                                    for _ in range(2))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x, y):
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        h = h + self.seen
        if self.training:
            with torch.no_grad():
                self.seen.add_(0.1)
        h = self.last(h)
        if self.narrow:
            return F.mse_loss(h.float(), y.float()) * 1e-5
        return F.mse_loss(h, y) if self.inside else h


SIZES = (8, 8, 4, None, 8)


def train(model: nn.Module, call: Any, scale: float, sizes: tuple[int | None, ...] = SIZES) -> list[torch.Tensor]:
    """Steps of these sizes, and evaluations -> losses, gradients, what the model holds, and the next random
    number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dtype = next(model.parameters()).dtype
    torch.manual_seed(3)
    x, y = torch.randn(8, 16).to(dtype), torch.randn(8, 4).to(dtype)
    seen = []
    for rows in sizes:
        if rows is None:
            model.eval()
            with torch.no_grad():
                seen.append(call(x[:4], y[:4]).clone())
            model.train()
            continue
        out = call(x[:rows], y[:rows])
        loss = out if out.dim() == 0 else F.mse_loss(out, y[:rows])
        (loss * scale).backward()
        seen += [loss.detach().clone(), *(full(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *map(full, model.state_dict().values()), torch.rand(1)]


def models(narrow: bool, inside: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Deep(inside, narrow)
    model = model.half() if narrow else model.double()
    return model, copy.deepcopy(model)


CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "rows": ({"mesh": {"dp": 2}}, True, False), "columns, and a loss outside": ({"mesh": {"tp": 2}}, False, False),
    "zero 3, and numbers of small range": ({"zero": 3}, True, True),
}


def in_microbatches(rank: int, cases: dict[str, tuple[dict[str, Any], bool, bool]], compiler: str = "eager"):
    """Of each: numbers, how far they are from one device's, what the log said, and where the time of each graph went."""
    from torch._dynamo.utils import counters

    found = {}
    for name, (options, inside, narrow) in cases.items():
        fresh()
        counters["inductor"].clear()
        said = listen()
        ours, theirs = models(narrow, inside)
        call = torch.compile(ours, backend="hpml", options={"compiler": compiler, "microbatches": 2, **options})
        scale = 2.0**12 if narrow else 2.0
        sizes = SIZES if name == "rows" else (8, None)
        seen = train(ours, call, scale, sizes if compiler == "eager" else (8,))
        expected = train(theirs, theirs, scale, sizes) if compiler == "eager" else seen  # inductor draws numbers of its own
        for a, b in zip(seen, expected, strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 1e-2, "atol": 2e-3} if narrow else {}))
        graphs = hpml_compiler.last_plan().graphs
        found[name] = (seen, [*said], [{*graph.seconds} for graph in graphs],
                       [graph.model_dump(exclude={"seconds", "blocks"}) for graph in graphs],
                       counters["inductor"]["fxgraph_cache_miss"])
    return found


@pytest.mark.timeout(240)
def test_microbatches_on_several_ranks(launch):
    first, again = (launch(in_microbatches, args=(CASES,)) for _ in range(2))
    for rank in range(2):
        for name in CASES:
            (before, _, _, planned, _), (after, _, seconds, restored, _) = first[rank][name], again[rank][name]
            assert_same(after, before)
            assert restored == planned, name
            assert all("restore" in each and not SOLVED & each for each in seconds), name
    for name in CASES:
        assert not any("not cached" in each or FOUND in each for each in first[0][name][1]), name
        assert sum(FOUND in each for each in again[0][name][1]) == len(again[0][name][2]) == (3 if name == "rows" else 2), name
        assert any(graph["microbatches"] for graph in again[0][name][3]), name


@pytest.mark.timeout(240)
def test_what_inductor_compiled_of_microbatches_is_found(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    cases = {"rows": CASES["rows"]}
    first, again = (launch(in_microbatches, args=(cases, "inductor"), timeout_s=110)[0]["rows"] for _ in range(2))
    assert_same(again[0], first[0])
    assert any(FOUND in each for each in again[1]) and first[-1] and not again[-1]


class InPieces(nn.Module):
    """Two graphs of blocks with dropout, which share the bytes of a step."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
                                    for _ in range(4))

    def forward(self, x):
        for block in self.blocks[:2]:
            x = x + block(x).sin()
        torch._dynamo.graph_break()
        for block in self.blocks[2:]:
            x = x + block(x).sin()
        return x.square().mean()


def under_budgets(rank: int, budgets: tuple[int, ...]):
    """Of each: numbers, what is kept for backward, what the graphs of a step hold, what the log said, where time went."""
    found = []
    for budget in budgets:
        fresh()
        said = listen()
        torch.manual_seed(0)
        model = InPieces()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"compiler": "eager", "mesh": {"dp": 2}, "memory_budget": budget}
        call, x, seen = torch.compile(model, backend="hpml", options=options), torch.randn(512, 16), []
        for _ in range(2):
            loss = call(x)
            loss.backward()
            seen += [loss.detach(), *(full(p.grad) for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        graphs = hpml_compiler.last_plan().graphs
        found.append((seen, [graph.model_dump(exclude={"seconds"})["kept"] for graph in graphs],
                      [replace(each, name="") for each in session.current().step.graphs.values()],
                      [each for each in said if FOUND in each or "not cached" in each], [{*graph.seconds} for graph in graphs]))
    return found


@pytest.mark.timeout(240)
def test_graphs_under_a_budget(launch):
    """They keep what they kept, and compute the rest once more; another budget is another graph."""
    tight, loose = 1_060_000, 1_300_000
    first, again = (launch(under_budgets, args=(budgets,)) for budgets in ((tight,), (tight, loose)))
    for rank in range(2):
        (before, kept, held, _, _), (after, restored, still, _, seconds) = first[rank][0], again[rank][0]
        assert_same(after, before)
        assert (restored, still) == (kept, held) and any(graph["again"] for graph in kept)
        assert all("restore" in each and not SOLVED & each for each in seconds)
        numbers, more, more_held, anew, _ = again[rank][1]
        torch.testing.assert_close(numbers, before)
        assert more != kept and sum(each.saved for each in more_held) > sum(each.saved for each in held)
        assert not first[rank][0][3] and not anew
    assert len(again[0][0][3]) == 2
