"""Estimates from Dynamo graphs: which outputs are large enough for a loss in chunks, by their sizes alone."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from passes.transforms.loss_chunks.loss_outside import chunks_may_pay

X, HEAD = torch.ones(2048, 16), torch.ones(8192, 16, requires_grad=True)
KERNEL = torch.ones(8192, 16, 1, 1, requires_grad=True)


def capped(x):
    return 30 * torch.tanh(F.linear(x, HEAD).view(8, -1, 8192).float() / 30)


def much_else(x):
    for _ in range(16):
        x = (x @ HEAD.T).exp() @ HEAD
    return x @ HEAD.T


def little_else_that_is_saved(x):
    for _ in range(8):
        x = x.view(2048, 1, 16).expand(-1, 512, -1).float().tanh()[:, 0].to(x.dtype)
    return x @ HEAD.T


CASES = {"capped": (capped, X, True), "no product": (lambda x: HEAD.sum(1)[None] * x.sum(1)[:, None], X, False),
         "few rows": (lambda x: x @ HEAD.T, X[:100], False), "small": (lambda x: x @ HEAD[:64].T, X, False),
         "convolution": (lambda x: F.conv2d(x.view(1, 16, 32, 64), KERNEL), X, False), "much else": (much_else, X, False),
         "little else": (little_else_that_is_saved, X, True),
         "no gradient": (lambda x: (x @ HEAD.T).detach(), X, False)}


@pytest.mark.parametrize("name", CASES)
def test_large_products_with_a_gradient_pay(name):
    function, x, pays = CASES[name]
    found = []

    def backend(gm, given):
        found.append(chunks_may_pay(gm, budgeted=False))
        return lambda *args: tuple(torch.zeros(0) for _ in range(1))

    torch.compiler.reset()
    torch.compile(function, backend=backend)(x)
    assert found == [pays]
