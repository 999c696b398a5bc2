"""Ranks that differ: weights and random numbers become rank 0's, other batches are an error on all ranks."""
from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hpml_compiler.runtime.consistency.checksums import differs, fingerprint, tolerance
from hpml_compiler.runtime.consistency.input_check import RanksDiffer
from tests.hpml_compiler.runtime.common import full

OPTIONS = {"compiler": "eager"}


class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(drop)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        return self.drop(self.frozen(self.norm(self.inner(x)).tanh()) * self.scale)


def trained(seed, compiled, drop=0.0, steps=3):
    """An unseeded script: whoever runs it draws other weights, other buffers, other state of the optimizer, other masks."""
    torch.manual_seed(seed)
    model, head = Net(drop).double(), nn.Linear(8, 3).double()  # the head is never compiled
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    call = torch.compile(model, backend="hpml", options=OPTIONS) if compiled else model
    batches = torch.randn(steps, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    losses = []
    for x in batches:
        loss = head(call(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: full(value) for name, value in [*model.state_dict().items(), *head.state_dict().items()]}


def run_unseeded(rank):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hpml").addHandler(handler)
    torch.testing.assert_close(trained(100 + rank, True), trained(100, False))
    told = [r.getMessage() for r in records if "Seed all ranks" in r.getMessage()]
    assert len(told) == (rank == 0)
    if told:
        assert "parameters and buffers (first `inner.weight`, on rank 1)" in told[0] and "generators" in told[0]
    records.clear()
    torch._dynamo.reset()
    expected = trained(5, True, drop=0.5)  # the same on both ranks: nothing to say
    assert not [r for r in records if "differed between ranks" in r.getMessage()]
    torch._dynamo.reset()
    torch.testing.assert_close(trained(5 + rank, True, drop=0.5), expected)


def ranks_differ(match, function):
    with pytest.raises(RanksDiffer, match=match) as error:
        function()
    if "call 1 of" not in error.value.what:  # values differ, or random numbers
        assert "numpy.random.seed" in error.value.next_step and "torch.seed()" in error.value.next_step


def run_other_batches(rank):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    call = torch.compile(model, backend="hpml", options=OPTIONS)
    x = torch.randn(8, 6)
    ranks_differ(r"`args\[0\]` is not the same on all ranks: rank 1 differs(.|\n)*distribute", lambda: call(x + rank))
    torch._dynamo.reset()
    target = torch.randint(0, 3, (8,))

    def step(target):
        model.zero_grad()
        nn.functional.cross_entropy(call(x), target).backward()

    ranks_differ("the gradient of output 1", lambda: step((target + rank) % 3))
    for _ in range(5):
        step(target)
    calls = 0
    with pytest.raises(RanksDiffer, match="the gradient of output"):
        for calls in range(100):  # noqa: B007
            step(target.roll(rank))
    assert 2 <= calls < 64
    torch._dynamo.reset()
    loss = torch.compile(lambda x, target: nn.functional.cross_entropy(x, target), backend="hpml", options=OPTIONS)
    ranks_differ("`target` is not the same", lambda: loss(x, target.roll(rank)))
    ranks_differ("`x` is not the same", lambda: loss(x.roll(rank, 0), target))


def run_other_masks(rank):
    torch.manual_seed(0)
    call = torch.compile(nn.Dropout(), backend="hpml", options=OPTIONS)
    x = torch.ones(8)
    torch.manual_seed(rank)
    masks = [None] * 2
    torch.distributed.all_gather_object(masks, call(x))  # the first call gives both ranks rank 0's state
    assert torch.equal(*masks)
    if rank:
        torch.rand(1)
    ranks_differ("random number generators of rank", lambda: [call(x) for _ in range(4)])


def run_all(rank):
    for case in (run_unseeded, run_other_batches, run_other_masks):
        torch._dynamo.reset()
        case(rank)


def test_ranks_that_are_not_alike(launch):
    launch(run_all, world_size=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
                                   torch.complex64])
@pytest.mark.parametrize("shape", [(5,), (512, 300), (), (2, 3, 8, 8)])
def test_fingerprints(dtype, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32) * 100).to(dtype)
    if dtype is torch.bool:
        x = torch.rand(shape) < 0.5
    tolerances = torch.tensor([tolerance(dtype)], dtype=torch.float64)

    def other(y):
        return bool(differs(fingerprint(x)[None], fingerprint(y)[None], tolerances))

    assert not other(x.clone())
    assert other(~x if dtype is torch.bool else x + x.new_tensor(3))
    if x.dim():
        assert other(x.roll(1, 0))
    if dtype.is_floating_point:
        assert not other(x * (1 + 1e-3 * tolerance(dtype)))
        nan = x.clone().fill_(float("nan"))
        assert other(nan) and not bool(differs(fingerprint(nan)[None], fingerprint(nan)[None], tolerances))
    if len(shape) == 4:
        y = x.to(memory_format=torch.channels_last)
        assert bool(differs(fingerprint(y)[None], fingerprint(y.roll(1, 1).contiguous(memory_format=torch.channels_last))[None],
                            tolerances))
