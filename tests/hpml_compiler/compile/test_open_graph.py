"""Options that leave microbatches and stages open -> a run takes those that a budget needs, with the numbers of one device."""
from __future__ import annotations

import logging
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.runtime.optimizer.resident_memory import local
from hpml_compiler.session import session
from tests.helpers.measured_nodes import PINS, SLOW_US, measure
from tests.helpers.plans import plan_of_ranks

EAGER: dict[str, Any] = {"compiler": "eager", "monitor": False}
ODD = 33
"""Two ranks divide neither rows nor any other size: placements gain nothing."""


class Layer(nn.Module):
    def __init__(self, width: int, mixes: bool):
        super().__init__()
        self.heads, self.norm = 3, nn.BatchNorm1d(width) if mixes else nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(self.norm, nn.BatchNorm1d) else self.norm(x)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(h).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, width: int = ODD, layers: int = 4, mixes: bool = False, has_loss: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.has_loss, self.tokens, self.head = has_loss, nn.Embedding(65, width), nn.Linear(width, 65)
        self.layers = nn.ModuleList(Layer(width, mixes) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), tokens) if self.has_loss else self.head(x)

    @staticmethod
    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).mul(7).remainder(65).view(rows, length)


def trained(model: GPT, tokens: Tensor, options: dict[str, Any] | None) -> list[Tensor]:
    """Losses and gradients of three steps."""
    model = model.double()
    call = model if options is None else torch.compile(model, backend="hpml", options={**EAGER, **options})
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        out = call(tokens)
        loss = out if model.has_loss else GPT.loss(out, tokens)
        loss.backward()
        found += [loss.detach().clone(), *(local(p.grad).clone() for p in model.parameters() if options is None)]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # pyright: ignore
        optimizer.step()
        optimizer.zero_grad()
    return [each for each in found if each.dim() == 0]


def in_stages(rank: int, has_loss: bool, words: list[str], launches: int) -> None:
    """launches: how often the script is run."""
    expected = trained(GPT(has_loss=has_loss), batch(3, 15), None)
    state = 8 * sum(p.numel() for p in GPT().parameters())
    budget = int((1.6 if has_loss else 1.95) * state)  # parameters and gradients alone take 2
    for launch in range(launches):
        del words[:]
        numbers = trained(GPT(has_loss=has_loss), batch(3, 15), {"memory_budget": budget, "optimizer": "sgd"})
        if rank == 0:
            (line,) = [each for each in words if each.startswith("hpml chose")]
            assert "2 stages" in line and ("as in an earlier launch" in line) == (launch > 0), line
            assert has_loss == ("gpipe" not in line), line
        plan = plan_of_ranks()
        assert all(graph.pipeline is not None and len(graph.pipeline.stages) == 2 for graph in plan.graphs)
        assert plan.memory.peak <= budget
        for ours, theirs in zip(numbers, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), (ours, theirs)
        hpml_compiler.reset()
        dist.barrier()


def mixed(rank: int, words: list[str]) -> None:
    with pytest.raises(Exception, match="rows of the batch depend on each other at") as caught:
        trained(GPT(layers=1, mixes=True), batch(3, 15), {"memory_budget": 200_000, "optimizer": "sgd"})
    assert "more than the budget of" in str(caught.value)
    assert rank or any("without microbatches and stages" in each for each in words)


def logged() -> list[str]:
    words: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("hpml").addHandler(handler)
    return words


def on_ranks(rank: int) -> None:
    words = logged()
    in_stages(rank, True, words, 2)
    in_stages(rank, False, words, 1)
    mixed(rank, words)


def test_a_budget_that_only_stages_meet(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("HPML_CACHE", "1")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    launch(on_ranks, timeout_s=180)


def completed(rank: int, pinned: dict[str, Any], mesh: dict[str, int], words: list[str]) -> None:
    """A mesh that is pinned in part: the search completes it, evaluation follows, and the numbers are those of one device."""
    hpml_compiler.reset()
    del words[:]
    model, tokens = GPT(12, 2), batch(4, 8)
    expected = trained(GPT(12, 2), tokens, None)
    numbers = trained(model, tokens, pinned)
    plan = plan_of_ranks()
    assert dict(plan.mesh) == mesh and len(plan.graphs) == 1
    assert rank or sum(each.startswith("hpml chose") for each in words) == 1, words
    for ours, theirs in zip(numbers, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), (ours, theirs)
    with torch.no_grad():
        evaluated = torch.compile(model, backend="hpml", options={**EAGER, **pinned})(tokens[:2])
    assert torch.isfinite(evaluated) and {tuple(each.mesh.items()) for each in plan_of_ranks().graphs} == {(*mesh.items(),)}


def refused(pinned: dict[str, Any], why: str, trains: bool = True) -> None:
    hpml_compiler.reset()
    with torch.set_grad_enabled(trains), pytest.raises(Exception, match=why):
        torch.compile(GPT(12, 1), backend="hpml", options={**EAGER, **pinned})(batch(4, 8))


def with_pins(rank: int) -> None:
    words = logged()
    completed(rank, {"mesh": {"dp": 2}, "microbatches": 2, "schedule": "gpipe"}, {"pp": 2, "dp": 2}, words)
    pipeline = plan_of_ranks().graphs[0].pipeline
    assert pipeline is not None and pipeline.schedule == "gpipe"
    refused({"mesh": {"x": 2}}, "multiplies to 2, but there are 4 ranks")
    refused({"mesh": {"tp": 2}}, "the first training step decides about the others", trains=False)
    refused({"schedule": "1f1b"}, "the schedule 1f1b is pinned, but no mesh: the first training step decides", trains=False)


def test_a_mesh_that_is_pinned_in_part_is_completed(launch):
    launch(with_pins, 4)


def faster(rank: int, folder: str) -> None:
    """On two nodes whose measured collectives are slow, two stages are chosen although everything fits."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # the ranks share no CPU
    if rank == 0:
        measure(SLOW_US).save(f"{folder}/cluster.json")
    dist.barrier()
    options = {**PINS, "costs": "measured", "cluster": f"{folder}/cluster.json"}
    numbers = trained(GPT(96, 2), batch(16, 64), options)
    assert dict(plan_of_ranks().mesh) == {"pp": 2}
    for ours, theirs in zip(numbers, trained(GPT(96, 2), batch(16, 64), None), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), (ours, theirs)


def test_stages_are_chosen_for_speed_where_prices_are_measured(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    launch(faster, args=(str(tmp_path),))


def test_a_budget_that_only_microbatches_meet_on_one_device(caplog):
    def run(**options: Any) -> list[Tensor]:
        hpml_compiler.reset()
        return trained(GPT(9, 2), batch(8, 64), {"optimizer": "sgd", **options})

    with pytest.raises(Exception, match="more than the budget") as caught:
        run(memory_budget=100_000, microbatches=1)
    found = re.search(r"set memory_budget to (\d+)", str(caught.value))
    assert found is not None
    budget = int(0.95 * int(found[1]))
    numbers = run(memory_budget=budget)
    (graph,) = session.last_plan().graphs
    assert graph.microbatches is not None and graph.memory.peak <= budget
    assert any(each.startswith(f"hpml chose {graph.microbatches.count} microbatches") for each in caplog.messages)
    for ours, theirs in zip(numbers, trained(GPT(9, 2), batch(8, 64), None), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    with pytest.raises(Exception, match="more than the budget"):
        run(memory_budget=budget, microbatches=1)  # pins stay
