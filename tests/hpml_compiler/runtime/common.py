"""Shared by the tests of the runtime: a small model, whole values, comparison."""
from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

X = torch.linspace(-1, 1, 24).view(4, 6)


def mlp() -> nn.Sequential:
    """The same small model at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def full(value):
    """The whole plain tensor behind a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_close(actual, expected, atol=1e-6):
    """Whole values agree."""
    torch.testing.assert_close(full(actual).detach(), full(expected).detach(), atol=atol, rtol=1e-5)


def assert_same_parameters(model, reference, atol=1e-6):
    """Same names, in the same order, with the same values."""
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name in ours:
        assert_close(ours[name], theirs[name], atol)


class Doubled(torch.autograd.Function):
    """A script's own autograd function."""

    @staticmethod
    def forward(ctx, value):
        return 2 * value

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
