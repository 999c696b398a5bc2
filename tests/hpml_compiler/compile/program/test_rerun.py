"""Steps in microbatches that run once more in backward: loss scales for numbers of small range, and gradients that arrive at
other outputs than the loss."""
from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import full

ROWS = 8
SCALES = (2.0**16, 2.0**16, 2.0**15, 2.0**12, 2.0**16)


class Half(nn.Module):
    """float16 inside, and a loss so small that its gradients underflow there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4)).half()

    def forward(self, x):
        return 1e-6 * self.layers(x).float().square().mean()


def gradients(model, call, x, scale):
    model.zero_grad()
    torch.manual_seed(3)
    (call(x) * scale).backward()
    return [full(p.grad).clone() for p in model.parameters()]


def scaled(rank, options):
    fresh()
    torch.manual_seed(0)
    ours, x = Half(), torch.randn(ROWS, 16).half()
    theirs = copy.deepcopy(ours)
    call = torch.compile(ours, backend="hpml", options={"microbatches": 4, "compiler": "eager", **options})
    assert not any(g.any() for g in gradients(theirs, theirs, x, 1.0)[:4])
    for scale in SCALES:
        expected = gradients(theirs, theirs, x, scale)
        assert all(g.any() for g in expected)
        for a, b in zip(gradients(ours, call, x, scale), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=float(b.abs().max()) * 1e-2)


def test_a_loss_scale_is_there_from_the_first_step_on():
    scaled(0, {})


def test_a_loss_scale_in_a_pipeline(launch):
    launch(scaled, 2, ({"mesh": {"pp": 2}},))


def test_a_scale_that_overflows_is_no_loss_where_the_next_does_not():
    """As GradScaler finds its scale: downwards, until there is no infinity among the gradients."""
    fresh()
    torch.manual_seed(0)
    ours, x = Half(), torch.randn(ROWS, 16).half()
    call = torch.compile(ours, backend="hpml", options={"microbatches": 2, "compiler": "eager"})
    found = [all(g.isfinite().all() for g in gradients(ours, call, x, scale)) for scale in (2.0**40, 2.0**16)]
    assert found == [False, True]


class Clipped(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 1)
    backward = staticmethod(lambda ctx, gradient: gradient.clamp(-0.01, 0.01))


class Constant(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 1)
    backward = staticmethod(lambda ctx, gradient: torch.full_like(gradient, 0.01))


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.sign() * 0.01)
    return x


class Nonlinear(nn.Module):
    """The backward of `between` is not linear in the gradient that it gets."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 8).double(), nn.Linear(8, 8).double(), between

    def forward(self, x):
        return self.last(F.dropout(self.between(self.first(x).tanh()), 0.3)).square().mean()


def unscaled(rank, options):
    x = torch.randn(ROWS, 8, dtype=torch.float64)
    for between in (Clipped.apply, Constant.apply, hooked):
        fresh()
        torch.manual_seed(0)
        ours = Nonlinear(between)
        theirs = copy.deepcopy(ours)
        call = torch.compile(ours, backend="hpml", options={"microbatches": 2, "compiler": "eager", **options})
        for scale in (3.0, 3.0, 0.5, 0.0):
            expected = gradients(theirs, theirs, x, scale)
            torch.testing.assert_close(gradients(ours, call, x, scale), expected, rtol=1e-12, atol=1e-14)


def test_gradients_that_are_not_linear_in_that_of_the_loss():
    unscaled(0, {})


def test_gradients_that_are_not_linear_in_a_pipeline(launch):
    launch(unscaled, 2, ({"mesh": {"pp": 2}},))


class TwoOutputs(nn.Module):
    """A loss, and features that a script may do something with; a buffer that changes, and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        features = F.dropout(self.first(x).tanh() + self.seen, 0.3)
        self.seen += 0.1
        return self.last(features).square().mean(), features


def steps(model, call, losses):
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of(*call(torch.randn(ROWS, 8, dtype=torch.double)))
        loss.backward()
        gradients = (full(torch.zeros_like(p) if p.grad is None else p.grad).clone() for p in model.parameters())
        seen += [loss.detach(), torch.rand(1), *gradients]
        optimizer.step()
    return [*seen, *map(full, model.state_dict().values())]


def loss_alone(loss, features):
    return 2 * loss


def with_features(loss, features):
    return 3 * loss + features.pow(3).mean()


def features_alone(loss, features):
    return features[1:3].sum()


def trained(rank, options, losses):
    fresh()
    torch.manual_seed(0)
    ours = TwoOutputs().double()
    theirs = copy.deepcopy(ours)
    call = torch.compile(ours, backend="hpml", options={"compiler": "eager", **options})
    for a, b in zip(steps(ours, call, losses), steps(theirs, theirs, losses), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("losses", [(with_features, with_features), (loss_alone, features_alone, loss_alone, with_features)],
                         ids=["always", "later"])
def test_gradients_that_arrive_at_another_output(losses, caplog):
    with caplog.at_level(logging.WARNING, "hpml"):
        trained(0, {"microbatches": 4}, losses)
    assert caplog.text.count("backward has a gradient for another output than the loss") == 1


def test_they_do_in_a_pipeline(launch):
    launch(trained, 2, ({"mesh": {"pp": 2}, "microbatches": 2}, (loss_alone, with_features, features_alone)))


def test_inductor_draws_the_same_numbers_again():
    fresh()
    torch.manual_seed(0)
    model = TwoOutputs().double()
    found = []
    for microbatches in (1, 2):
        fresh()
        own = copy.deepcopy(model)
        call = torch.compile(own, backend="hpml", options={"microbatches": microbatches})
        found.append(steps(own, call, (with_features, loss_alone)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
