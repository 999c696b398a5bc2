"""Outputs that no loss reads: parameters used only by them get no gradient, and optimizers skip them."""
from __future__ import annotations

import torch
from torch import nn

from tests.scripts.models import adamw, inputs
from tests.scripts.use import use


class Heads(nn.Module):
    """Two heads on one body; the second is returned as it is, as a view, and through a function without a slope."""

    def __init__(self, detached: bool = False):
        super().__init__()
        self.body, self.one, self.two, self.detached = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 8), detached

    def forward(self, x):
        hidden = self.body(x).tanh()
        two = self.two(hidden.detach() if self.detached else hidden)
        return self.one(hidden), two, two.t()[1:], torch.round(4 * two)


def _decayed(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


def _missing(model):
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def _train(hp, model, losses, **options):
    """One step for each function of the model's outputs: the model, and which gradients were None after each step."""
    call, optimizer, missing = hp.compile(model, **options), _decayed(model), []
    for loss in losses:
        optimizer.zero_grad()
        loss(call(inputs())).backward()
        missing.append(_missing(model))
        optimizer.step()
    return missing, model, optimizer


def first(outputs):
    return outputs[0].pow(2).mean()


def second(outputs):
    return outputs[1].pow(2).mean()


def view(outputs):
    return outputs[2].pow(2).mean()


def rounded(outputs):
    return outputs[3].pow(2).mean()


@use
def outputs_in_turn(hp):
    return _train(hp, Heads(), [first, second, lambda outputs: first(outputs) + second(outputs), first, view])


@use
def output_that_is_a_view_alone(hp):
    return _train(hp, Heads(), [view] * 3)


@use
def output_of_a_detached_value_alone(hp):
    return _train(hp, Heads(detached=True), [second, view, first])


@use
def output_with_gradients_of_zeros_alone(hp):
    """These gradients exist, and weights decay."""
    return _train(hp, Heads(), [rounded] * 3)


class Branches(nn.Module):
    """The loss is inside; what is returned beside it has weights of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.head(hidden).pow(2).mean(), self.aside(hidden)


@use
def loss_inside_beside_an_unread_output(hp):
    return _train(hp, Branches(), [lambda outputs: outputs[0]] * 3)


class Across(nn.Module):
    """A graph break between body and heads: the second graph reads one of two results of the first."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.heads = nn.Linear(16, 16), nn.Linear(16, 16), Heads()

    def forward(self, x):
        one, two = self.one(x), self.two(x)
        torch._dynamo.graph_break()
        return *self.heads(one), two.sum(0)


@use
def unread_results_across_a_graph_break(hp):
    return _train(hp, Across(), [first, second])


@use
def unread_gradients_that_are_asked_for(hp):
    model = Heads()
    outputs = hp.compile(model)(inputs())
    found = torch.autograd.grad(first(outputs), list(model.parameters()), allow_unused=True)
    return [gradient is None for gradient in found], [gradient for gradient in found if gradient is not None]


@use
def two_backwards_of_one_forward(hp):
    model = Heads(detached=True)
    outputs = hp.compile(model)(inputs())
    second(outputs).backward(retain_graph=True)
    then = _missing(model)
    first(outputs).backward()
    return then, _missing(model), model


@use
def accumulated_over_different_outputs(hp):
    model = Heads()
    call, optimizer, missing = hp.compile(model), adamw(model), []
    for _ in range(2):
        optimizer.zero_grad()
        for loss in (first, second):
            loss(call(inputs())).backward()
            missing.append(_missing(model))
        optimizer.step()
    return missing, model, optimizer


class OutOfReach(torch.autograd.Function):
    """A function that gives no gradient to its second argument."""

    @staticmethod
    def forward(ctx, x, y):
        return x * 2 + y.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class WithFunction(Heads):
    def forward(self, x):
        one, two, _, _ = super().forward(x)
        return one, OutOfReach.apply(two, one.repeat(1, 2)), two[:, :2]


@use
def unread_output_beside_a_custom_function(hp):
    return _train(hp, WithFunction(), [second, first, view])
