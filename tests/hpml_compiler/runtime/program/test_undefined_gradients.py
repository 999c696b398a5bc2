"""Gradients of unread outputs on one device -> None where eager gives None. On several ranks: tests/scripts/uses/unread.py."""
from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        hidden = self.body(x).relu()
        two = self.two(hidden)
        return self.one(hidden), self.two(hidden.detach()), two.t()[1:], torch.sign(two)


def gradients_of(call, model, which):
    model.zero_grad()
    call(torch.arange(64.).view(8, 8) / 64)[which].pow(2).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [{"compiler": "eager"}, {}, {"compiler": "eager", "memory_budget": 0.9},
                                     {"compiler": "eager", "compile_blocks": "on"}], ids=str)
def test_one_device(options):
    model = Heads()
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend="hpml", options=options)
    for which in (0, 1, 2, 3, 0):
        expected, found = gradients_of(eager, eager, which), gradients_of(call, model, which)
        assert [g is None for g in found] == [g is None for g in expected], which
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_graph_that_cannot_run_without_data_is_told_of(caplog):
    @torch.compiler.allow_in_graph
    def split(x):
        if type(x).__name__ != "Parameter" and isinstance(x, torch._subclasses.FakeTensor) and traced:
            raise ValueError("no data")
        return x * 2

    traced = []
    body, aside = nn.Linear(8, 8), nn.Linear(8, 8)
    call = torch.compile(lambda x: (split(body(x)), aside(x)), backend="hpml", options={"compiler": "eager"})
    first, _ = call(torch.ones(8, 8))
    traced.append(True)
    with caplog.at_level(logging.WARNING, "hpml"):
        first.sum().backward()
    assert "zero gradients instead of None" in caplog.text and "no data" in caplog.text
    assert aside.weight.grad is not None and not aside.weight.grad.any()


def test_hooks_hold_no_graph_of_a_step():
    model = Heads()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager"})
    gc.disable()
    try:
        outputs = call(torch.ones(8, 8))
        node = weakref.ref(outputs[0].grad_fn)
        outputs[0].sum().backward()
        del outputs
        assert node() is None
    finally:
        gc.enable()
