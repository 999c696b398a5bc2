"""Dynamo's graph of a model -> which of its outputs may be detached, and the graph with them detached."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.transforms.outputs.outputs_beside_loss import detach_results, outputs_beside_loss

X, WEIGHT = torch.ones(256, 128), nn.Parameter(torch.ones(128, 64))


def traced(function, *inputs: torch.Tensor):
    found = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, given: found.append((gm, given)) or gm.forward)(*inputs)
    return found[0]


def beside(x, weight):
    logits = x @ weight
    loss = logits.sin().cos().exp().square().mean()
    return loss, logits, logits[:4], logits.argmax(-1), logits.exp().sin(), x


def view(x, weight):
    logits = (x @ weight).cos()
    return logits, logits.flatten(), logits.sum()


def scale(x, weight):
    return (x @ weight).exp().cos().sin(), weight.sum()


def without_loss(x, weight):
    return x @ weight, (x @ weight).exp()


def counting(x, weight, seen):
    seen.add_(1)
    return (x @ weight).sum() + seen, (x @ weight).exp()


def normalized(x, weight, count, mean, variance):
    count.add_(1)
    hidden = F.batch_norm(x @ weight, mean, variance, training=True)
    return hidden.square().mean(), hidden


@pytest.mark.parametrize(("function", "inputs", "found"), [
    (beside, (), (4,)), (view, (), ()), (scale, (), ()), (without_loss, (), ()), (counting, (torch.ones(()),), ()),
    (normalized, (torch.tensor(0), torch.zeros(64), torch.ones(64)), (1,))], ids=lambda x: getattr(x, "__name__", ""))
def test_results_with_a_gradient_and_memory_of_their_own_are_detached(function, inputs, found):
    gm, given = traced(function, X, WEIGHT, *inputs)
    assert outputs_beside_loss(gm) == found
    before = [x.requires_grad for x in gm(*given)]
    after = [x.requires_grad for x in detach_results(gm, found)(*given)]
    assert after == [grad and k not in found for k, grad in enumerate(before)]
