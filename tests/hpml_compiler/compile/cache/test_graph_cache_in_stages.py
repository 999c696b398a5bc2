"""A script launched again whose graphs go through stages -> they are neither traced, planned nor cut, and it computes the
same."""
from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from tests.helpers.frozen import fresh
from tests.hpml_compiler.compile.cache.test_graph_cache import FOUND, assert_same, folder, full, listen
from tests.hpml_compiler.compile.cache.test_graph_cache_in_parts import SIZES, SOLVED, Deep, train

__all__ = ["folder"]  # a cache of its own for each test


class TwoEnds(Deep):
    """Features besides the loss."""

    def forward(self, x, y):
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        h = self.last(h)
        return F.mse_loss(h, y), h


class Small(nn.Module):
    """Has fewer parts than there are stages, where the graph breaks before the loss."""

    def __init__(self):
        super().__init__()
        self.deep = Deep(inside=False)

    def forward(self, x, y):
        h = self.deep(x, y)
        torch._dynamo.graph_break()
        return F.mse_loss(h, y)


CASES: dict[str, tuple[dict[str, Any], type[nn.Module], tuple, float]] = {
    "1f1b": ({}, Deep, (), 2.0),
    "weights later, numbers of small range": ({"schedule": "zero_bubble"}, Deep, (True, True), 2.0**12),
    "another end": ({}, TwoEnds, (), 2.0),
    "a break before the loss": ({}, Small, (), 2.0),
    "one microbatch": ({"microbatches": 1}, Deep, (), 2.0),
    "a budget": ({"memory_budget": "64MiB"}, Deep, (), 2.0),
}
GRAPHS = {"1f1b": 3, "another end": 1, "a break before the loss": 4}
SPLIT = {"each stage on two ranks": ({"mesh": {"pp": 2, "tp": 2}}, Deep, (), 2.0)}


def in_stages(rank: int, cases: dict[str, tuple[dict[str, Any], type[nn.Module], tuple, float]]):
    """Of each: numbers, what the log said, where the time of each graph went, and its plan."""
    found = {}
    for name, (options, kind, arguments, scale) in cases.items():
        fresh()
        said = listen()
        torch.manual_seed(0)
        narrow = "small range" in name
        ours = kind(*arguments).half() if narrow else kind(*arguments).double()
        theirs = copy.deepcopy(ours)
        call = torch.compile(ours, backend="hpml", options={
            "compiler": "eager", "mesh": {"pp": 2}, "microbatches": 2, **options})
        steps = end_to_end if kind is TwoEnds else partial(train, sizes=SIZES if name == "1f1b" else (8, None))
        seen, expected = steps(ours, call, scale), steps(theirs, theirs, scale)
        for a, b in zip(seen, expected, strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 1e-2, "atol": 2e-3} if narrow else {}))
        graphs = hpml_compiler.last_plan().graphs
        found[name] = (seen, [*said], [{*graph.seconds} for graph in graphs], [
            graph.model_dump(exclude={"seconds": True, "blocks": True, "solver": {"seconds"}}) for graph in graphs])
    return found


def end_to_end(model: nn.Module, call: Any, scale: float) -> list[torch.Tensor]:
    """Steps whose gradients arrive at both ends, and at the loss alone."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
    torch.manual_seed(3)
    x, y = torch.randn(8, 16).double(), torch.randn(8, 4).double()
    for both in (True, False, True):
        loss, h = call(x, y)
        ((loss + h.square().mean() if both else loss) * scale).backward()
        seen += [loss.detach().clone(), *(full(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *map(full, model.state_dict().values()), torch.rand(1)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, SPLIT)])
def test_a_second_launch_decides_nothing(ranks, cases, launch):
    first, again = (launch(in_stages, ranks, (cases,), timeout_s=140) for _ in range(2))
    for rank in range(ranks):
        for name in cases:
            (before, _, _, planned), (after, _, seconds, restored) = first[rank][name], again[rank][name]
            assert_same(after, before)
            assert restored == planned, name
            if cases[name][1] is not TwoEnds:  # which is cut once more for its other end
                assert all("restore" in each and not SOLVED & each for each in seconds), (name, seconds)
    for name in cases:
        before, after = first[0][name][1], again[0][name][1]
        assert not any(FOUND in each for each in before), name
        assert sum(FOUND in each for each in after) == GRAPHS.get(name, 2), (name, after)
        assert not any("is not cached" in each for each in before), name
