"""Backward is linear in the loss's tangent, but for the calls that are named."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from passes.tracing.joint_trace import trace
from passes.transforms.microbatch.tangent_linearity import nonlinear_calls
from tests.combinations.models import MODELS, batch
from tests.combinations.space import WithLoss


def named(model: torch.nn.Module, given: Any) -> list[str]:
    (traced,) = trace(model, given)
    (tangent,) = (node.name for node in traced.gm.graph.find_nodes(op="placeholder") if node.name.startswith("tangents"))
    return nonlinear_calls(traced.gm, tangent, traced.forward_outputs)


@pytest.mark.parametrize("name", MODELS)
def test_backward_of_models_is_linear(name):
    assert named(WithLoss(MODELS[name](2)), batch(name)) == []


class Through(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.body, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.body(x)).square().sum()


def clipping(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return x


def shifting(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient + 1)
    return x


def masking(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: torch.where(gradient.isnan(), 0.0, gradient * 2))
    return x


@pytest.mark.parametrize("function, linear", [
    (lambda x: x[:, 1:].relu().cumsum(0), True), (lambda x: F.dropout(x.index_select(0, torch.tensor([1, 1, 0])), 0.5), True),
    (lambda x: torch.where(x > 0, x, 0.1 * x), True), (lambda x: x.topk(2).values.exp().log_softmax(-1), True),
    (lambda x: x.sign(), True), (clipping, False), (shifting, False), (masking, False)])
def test_calls_that_are_not_linear_are_named(function, linear):
    assert (not named(Through(function), (torch.randn(3, 4),))) is linear
