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


@use(refused=r"(?s)sparse gradient.*sparse=False")
def sparse_adam(hp):
    model = SparselyEmbedded()
    call = hp.compile(model)
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01, eps=1e-4)
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(2):
        loss = F.cross_entropy(call(tokens()).flatten(0, 1), tokens().roll(1, 1).flatten())
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    return loss, model


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
def gradual_unfreezing(hp):
    model = mlp()
    model.requires_grad_(False)
    call, losses = hp.compile(model), []
    for layer in (model[4], model[2], model[0]):
        layer.requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses += [step(call, optimizer, inputs(), targets()) for _ in range(2)]
    return losses, model


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


@use
def bias_only(hp):
    model = mlp()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return train(hp, model)


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
def adapters(hp):
    class Adapted(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.down, self.up = layer.requires_grad_(False), nn.Linear(16, 4), nn.Linear(4, 16)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            h = self.layer(x)
            return h + self.up(F.relu(self.down(h)))

    return train(hp, nn.Sequential(Adapted(nn.Linear(16, 16)), nn.Tanh(), Adapted(nn.Linear(16, 16)), nn.Linear(16, 4)))


@use
def prompt_tuning(hp):
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(3, 8))
            self.body = Language().requires_grad_(False)

        def forward(self, ids):
            h = torch.cat([self.prompt.expand(len(ids), -1, -1), self.body.embedding(ids)], 1)
            return self.body.head(self.body.body(h).cumsum(1).tanh())[:, 3:]

    return _language(hp, Prompted())


@use
def pruned(hp):
    model = mlp()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    return train(hp, model)


@use
def pruned_on_the_way(hp):
    model = mlp()
    losses, *_ = train(hp, model, steps=2)
    prune.ln_structured(model[0], "weight", amount=0.25, n=2, dim=0)
    more, *_ = train(hp, model, steps=2)
    prune.remove(model[0], "weight")
    return losses, more, model


@use
def masks_by_hand(hp):
    """The lottery ticket's: masks made of the weights, put on weights and gradients after each step."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = [step(call, optimizer, inputs(), targets()) for _ in range(2)]
    masks = {name: (p.detach().abs() > p.detach().abs().median()).to(p.dtype) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name] * masks[name])
    for _ in range(2):
        F.mse_loss(call(inputs()), targets()).backward()
        for name, p in model.named_parameters():
            p.grad.mul_(masks[name])
        optimizer.step()
        optimizer.zero_grad()
    return losses, masks, model, optimizer


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x, mask):
        return F.linear(x, self.net.weight * mask, self.net.bias)


@use
def a_mask_made_of_weights_as_input(hp):
    model = Masked()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(3):
        with torch.no_grad():
            mask = (model.net.weight.abs() > 0.1).to(torch.float64)
        optimizer.zero_grad()
        loss = call(inputs(16), mask).square().mean()
        loss.backward()
        optimizer.step()
    return loss, mask, model, optimizer


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
def elastic_weight_consolidation(hp):
    """EWC: after a task, anchors and Fisher information hold the weights near where they were."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    losses = [step(call, optimizer, inputs(), targets()) for _ in range(2)]
    model.zero_grad()
    call(inputs()).log_softmax(-1)[:, 0].mean().backward()
    fisher = {n: p.grad.detach().square() for n, p in model.named_parameters()}
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        penalty = sum((fisher[n] * (p - anchor[n]).square()).sum() for n, p in model.named_parameters())
        loss = F.mse_loss(call(inputs().flip(0)), targets()) + 10 * penalty
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, fisher, model, optimizer


class Anchored(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 4)

    def forward(self, x, anchor):
        return self.net(x).square().mean() + (self.net.weight - anchor).square().sum()


@use
def an_anchor_as_input(hp):
    model = Anchored()
    call, optimizer, anchor = hp.compile(model), sgd(model), torch.zeros(4, 16)
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(inputs(), anchor)
        loss.backward()
        optimizer.step()
        anchor = model.net.weight.detach().clone()
    return loss, anchor, model, optimizer


@use
def proximal_penalty_in_the_loop(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    anchor = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets())
        loss = loss + sum((p - a).norm() ** 2 for p, a in zip(model.parameters(), anchor)) + \
            0.001 * sum(p.abs().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
    return loss, model, optimizer


@use
def maml_in_eager(hp):
    """One inner step by hand on the weights, the outer gradient through it; the module is not compiled for that."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    losses, _, optimizer = train(hp, model, steps=1)
    for _ in range(2):
        names = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, names, (inputs(),)), targets())
        grads = torch.autograd.grad(inner, list(names.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(names.items(), grads)}
        loss = F.mse_loss(functional_call(model, moved, (inputs().flip(0),)), targets())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def reptile(hp):
    model = mlp()
    call = hp.compile(model)
    for _ in range(2):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        for _ in range(2):
            step(call, sgd(model, momentum=0), inputs(), targets())
        after = model.state_dict()
        model.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})
    return model


@use
def functional_call_compiled(hp):
    model = mlp()
    call = hp.compile(lambda parameters, x: functional_call(model, parameters, (x,)))
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    losses = []
    for _ in range(3):
        loss = F.mse_loss(call(parameters, inputs()), targets())
        grads = torch.autograd.grad(loss, list(parameters.values()))
        parameters = {n: (p - 0.1 * g).detach().requires_grad_() for (n, p), g in zip(parameters.items(), grads)}
        losses.append(loss.item())
    return losses, parameters


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
def straight_through_by_detach(hp):
    class Signs(nn.Linear):
        def forward(self, x):
            w = self.weight
            return F.linear(x, w + (w.sign() * w.abs().mean() - w).detach(), self.bias)

    return train(hp, nn.Sequential(Signs(16, 16), nn.Hardtanh(), Signs(16, 4)))


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
def weights_expanded(hp):
    """Net2Net: a wider layer takes over the narrower one's weights."""
    narrow = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    losses, *_ = train(hp, narrow, steps=2)
    wide = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        wide[0].weight.copy_(torch.cat([narrow[0].weight, narrow[0].weight]))
        wide[0].bias.copy_(torch.cat([narrow[0].bias, narrow[0].bias]))
        wide[2].weight.copy_(torch.cat([narrow[2].weight / 2, narrow[2].weight / 2], 1))
        wide[2].bias.copy_(narrow[2].bias)
    same = wide(inputs()) - narrow(inputs())
    return losses, same, train(hp, wide, steps=2)


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
