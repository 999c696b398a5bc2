"""Parameters that are tied, frozen, adapted, pruned, normalized, made anew; and buffers."""
from __future__ import annotations

import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from tests.scripts.models import adamw, inputs, mlp, sgd, step, targets, tokens, train
from tests.scripts.use import use


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 4)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.head(self.down(self.up(x).relu()))


@use
def tied(hp):
    return train(hp, Tied())


class Language(nn.Module):
    """The embedding is the head, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)).tanh())


def _language(hp, model, optimizer=None, steps=3):
    call, losses = hp.compile(model), []
    optimizer = optimizer or adamw(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(tokens()).flatten(0, 1), tokens().roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def embedding_tied_to_the_head(hp):
    return _language(hp, Language())


class EagerFirst(Language):
    """The weight is read by code that Dynamo leaves alone, before the first graph that reads it is compiled."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    @torch._dynamo.disable
    def first(self, ids):
        weight = self.embedding.weight
        if self.how == "sliced":
            return weight[:, 2:6][ids].repeat(1, 1, 2)
        if self.how == "saved":  # for backward
            return F.one_hot(ids, 16).to(weight.dtype) @ (weight * weight)
        return F.embedding(ids, weight)

    def forward(self, ids):
        return self.head(self.body(self.first(ids)).tanh())


@use
def tied_weight_is_read_in_eager_code_first(hp):
    return [_language(hp, EagerFirst(how)) for how in ("looked up", "sliced", "saved")]


@use
def tied_weight_that_eager_code_reads_first_with_hooks_and_accumulation(hp):
    model = EagerFirst("looked up")
    seen, call, optimizer = [], hp.compile(model), adamw(model)
    model.head.weight.register_hook(lambda g: g * 0.5)
    for _ in range(2):
        for number in range(2):
            out = call(tokens().roll(number, 0))
            F.cross_entropy(out.flatten(0, 1), tokens().flatten()).backward()
        seen.append(model.head.weight.grad.sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, model, optimizer


@use
def padding_and_sparse_gradients(hp):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 16)

        def forward(self, ids):
            return self.head(self.embedding(ids))

    return _language(hp, Padded())


class SparselyEmbedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.embedding(ids))


@use
def embedding_with_a_largest_norm(hp):
    class Bounded(SparselyEmbedded):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 8, max_norm=1.0)

    return _language(hp, Bounded())


@use
def frozen_and_thawed(hp):
    model = mlp()
    model[0].requires_grad_(False)
    losses, *_ = train(hp, model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    model[0].requires_grad_(True)
    return losses, train(hp, model)


@use
def frozen_in_turn(hp):
    """Alternating: what was trained is frozen, and the other way round; gradients stay where they were."""
    model = mlp()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for number in range(4):
        model[0].requires_grad_(number % 2 == 0)
        model[4].requires_grad_(number % 2 == 1)
        losses.append(step(call, optimizer, inputs(), targets()))
    return losses, model, optimizer


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, base.in_features)), nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 0.5


@use
def lora(hp):
    model = mlp()
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    model[4].requires_grad_(False)
    return train(hp, model)


@use
def lora_added_and_merged(hp):
    """After some steps of the whole; merged into the base at the end."""
    model = mlp()
    losses, *_ = train(hp, model, steps=2)
    model[0] = LoRA(model[0])
    more, *_ = train(hp, model, steps=2)
    with torch.no_grad():
        model[0].base.weight += model[0].b @ model[0].a * 0.5
    model[0] = model[0].base
    return losses, more, hp.compile(model)(inputs()), model


@use
def pruned_on_the_way(hp):
    model = mlp()
    losses, *_ = train(hp, model, steps=2)
    prune.ln_structured(model[0], "weight", amount=0.25, n=2, dim=0)
    more, *_ = train(hp, model, steps=2)
    prune.remove(model[0], "weight")
    return losses, more, model


@use
def weight_norm(hp):
    model = mlp()
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[2], dim=1)
    return train(hp, model)


@use
def spectral_norm(hp):
    model = mlp()
    parametrizations.spectral_norm(model[0])
    parametrizations.spectral_norm(model[2], n_power_iterations=2)
    return train(hp, model)


@use
def old_weight_norm(hp):
    model = mlp()
    with __import__("warnings").catch_warnings():
        __import__("warnings").simplefilter("ignore")
        nn.utils.weight_norm(model[0])
    return train(hp, model)


@use
def orthogonal(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    parametrizations.orthogonal(model[0], orthogonal_map="cayley")
    return train(hp, model)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


@use
def parametrized(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    seen = train(hp, model)
    parametrize.remove_parametrizations(model[0], "weight")
    return seen, model, hp.compile(model)(inputs())


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(2)])
        self.named = nn.ParameterDict({"scale": torch.ones(16), "out": torch.randn(16, 4) / 4})

    def forward(self, x):
        for w in self.weights:
            x = torch.tanh(x @ w) * self.named["scale"]
        return x @ self.named["out"]


@use
def lists_and_dicts_of_parameters(hp):
    return train(hp, Listed())


class ListsAnother(nn.Module):
    """Its own list of parameters names those of a module that it also has."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.all = nn.ParameterList(self.net.parameters())

    def forward(self, x):
        return self.net(x) + 0.01 * sum(p.square().sum() for p in self.all)


@use
def a_parameter_that_two_modules_list(hp):
    return train(hp, ListsAnother())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("scratch", torch.zeros(16), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.scratch = self.scratch + x.std(0).detach()
        return self.net(x - self.average)


@use
def buffers(hp):
    return train(hp, Counting())


@use
def buffers_from_outside(hp):
    """The script writes to a buffer between the steps."""
    model = Counting()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for number in range(3):
        losses.append(step(call, optimizer, inputs(), targets()))
        model.average.fill_(number / 10)
        model.scratch = torch.full((16,), float(number))
    return losses, model, optimizer


@use
def functional_call_of_a_trained_model(hp):
    """The weights that are given are of a model that is placed already."""
    model = mlp()
    losses, *_ = train(hp, model, steps=2)
    call = hp.compile(lambda parameters, x: functional_call(model, parameters, (x,)))
    moved = {n: p.detach() * 0.9 for n, p in model.named_parameters()}
    return losses, call(moved, inputs()), model


class Hyper(nn.Module):
    """A network that makes another's weights."""

    def __init__(self):
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(6)), nn.Linear(6, 16 * 4 + 4)

    def forward(self, x):
        flat = self.make(self.code)
        return F.linear(x, flat[:64].view(4, 16), flat[64:])


@use
def hypernetwork(hp):
    return train(hp, Hyper())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return (w * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


class Quantized(nn.Linear):
    def forward(self, x):
        return F.linear(x, Straight.apply(self.weight), self.bias)


@use
def quantization_aware(hp):
    return train(hp, nn.Sequential(Quantized(16, 16), nn.Tanh(), Quantized(16, 4)))


@use
def initialized_anew(hp):
    """Some layers are drawn again between the steps."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    losses = [step(call, optimizer, inputs(), targets())]
    model[4].reset_parameters()
    losses.append(step(call, optimizer, inputs(), targets()))
    nn.init.kaiming_uniform_(model[2].weight, a=math.sqrt(5))
    nn.init.orthogonal_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    losses.append(step(call, optimizer, inputs(), targets()))
    return losses, model, optimizer


@use
def lazy_layers(hp):
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))
    model(inputs())
    return train(hp, model)


@use
def a_layer_swapped_for_another(hp):
    model = mlp()
    losses, *_ = train(hp, model, steps=2)
    model[4] = nn.Linear(16, 4, bias=False)
    return losses, train(hp, model, steps=2)


@use
def frozen_weights_changed_in_forward(hp):
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.fast = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.fast.weight.mul_(0.9).add_(x.t() @ x, alpha=0.01)
            return self.net(x) + self.fast(x)

    model = Decays()
    return train(hp, model, y=targets(8, 16), optimizer=torch.optim.SGD(model.net.parameters(), 0.1))
