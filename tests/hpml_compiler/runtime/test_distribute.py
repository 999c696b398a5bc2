"""Batches of a loader -> this rank's rows of them."""
from __future__ import annotations

import copy
import functools
import logging
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpml_compiler.runtime.batch.batch_shard import BatchShard
from hpml_compiler.runtime.batch.distributed_loader import distribute
from passes.errors import BadInput
from tests.helpers.frozen import in_turn
from tests.hpml_compiler.runtime.common import assert_same_parameters, full, mlp
from tests.hpml_compiler.runtime.toy import Toy

Named = namedtuple("Named", "x y")


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    text: str = "as it is"


def test_one_rank_gets_the_batches_themselves(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    batches = [torch.ones(2), {"a": torch.ones(3)}]
    assert all(a is b for a, b in zip(distribute(batches), batches, strict=True))


def run_structures(rank):
    x, y = torch.arange(24.0).view(8, 3), torch.arange(8)
    batches = [x, (x, y), [x, [y, "text"]], Named(x, y), {"x": x, "n": 3}, UserDict(x=x, y=None), Batch(x),
               {"deep": [{"x": x}, torch.tensor(2.0)]}]
    for batch, got in zip(batches, distribute(batches), strict=True):
        assert type(got) is (BatchShard if batch is x else type(batch))
    first, pair, nested, named, mapping, user, data, deep = distribute(batches)
    for rows in (first, pair[0], nested[0], named.x, mapping["x"], user["x"], data.x, deep["deep"][0]["x"]):
        assert type(rows) is BatchShard and rows.shape == (8, 3)
        assert torch.equal(rows.to_local(), x[4 * rank:4 * rank + 4])
        assert torch.equal(full(rows), x)
    assert nested[1][1] == "text" and mapping["n"] == 3 and user["y"] is None and data.text == "as it is"
    assert type(deep["deep"][1]) is torch.Tensor
    assert batches[4]["x"] is x and batches[6].x is x  # the loader's own batches are left alone


def run_odd(rank):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hpml_compiler.runtime.batch.distributed_loader").addHandler(handler)
    batches = list(distribute([torch.ones(8), torch.ones(5), torch.ones(3)]))
    assert [type(batch) for batch in batches] == [BatchShard, torch.Tensor, torch.Tensor]
    assert len(records) == 1 and "5 rows is stored whole" in records[0].getMessage()


def run_different(rank):
    with pytest.raises(BadInput, match="the batch differs between ranks(.|\n)*rows=.own."):
        list(distribute([torch.full((4,), float(rank))]))


def run_group(rank):
    assert not torch.distributed.is_initialized()
    (rows,) = distribute([torch.arange(4)])  # makes the process group, as the backend would
    assert rows.to_local().tolist() == [2 * rank, 2 * rank + 1]


def test_the_process_group_is_made_if_there_is_none(launch):
    launch(run_group, world_size=2, init=False)


def run_loader(rank):
    data = TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(0)),
                         torch.randint(0, 4, (20,), generator=torch.Generator().manual_seed(1)))
    results = []
    for split in (True, False):
        torch.manual_seed(7)
        plain = DataLoader(data, batch_size=8, shuffle=True)  # the last batch has 4 rows
        loader = distribute(plain) if split else plain
        model = mlp()
        call = torch.compile(model, backend=Toy(aot=True)) if split else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(loader) == 3 and loader.batch_size == 8
        for _ in range(2):
            for inputs, labels in loader:
                assert isinstance(inputs, BatchShard) == split
                optimizer.zero_grad()
                nn.functional.cross_entropy(call(inputs), labels).backward()
                optimizer.step()
        results.append(model)
    assert_same_parameters(*results)


class Inner(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


class GivesUp(nn.Module):
    """Dynamo leaves this frame to Python, and goes on with the functions that it calls."""

    def __init__(self):
        super().__init__()
        self.inner = Inner(4, 4)

    def forward(self, x):
        try:
            torch._dynamo.graph_break()
            return self.inner(x) + self.inner(x * 2 + torch.ones(4)).square()
        finally:
            torch._dynamo.graph_break()


def run_sizes(rank, model):
    """Every batch size is another graph; rows of one must not run through the graph of another."""
    torch.manual_seed(0)
    model = model()
    reference = copy.deepcopy(model)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager"})
    batches = [torch.randn(n, 4) for n in (8, 4, 12, 7, 8)]
    for x, rows in zip(batches, distribute(batches), strict=True):
        for function, batch in ((call, rows), (reference, x)):
            function.zero_grad()
            function(batch).square().mean().backward()
        for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), expected.grad)


def test_several_ranks(launch):
    sizes = [functools.partial(run_sizes, model=model) for model in (functools.partial(nn.Linear, 4, 4), GivesUp)]
    launch(in_turn, args=(run_structures, run_odd, run_different, run_loader, *sizes))
