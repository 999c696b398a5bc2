"""Control flow: breaks, branches on data, what forward returns, sizes that vary, modes, hooks, higher derivatives."""
from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.scripts.models import adamw, classes, inputs, mlp, sgd, step, targets, tokens, train
from tests.scripts.use import use


class Breaks(nn.Module):
    """Two graph breaks, one of them on a value."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        h = self.b(h) + self.a(x)
        if h.sum().item() > 0:
            h = -h
        return self.c(h)


@use(refused={"parts": "backward has a gradient for another output than the loss"})
def graph_breaks(hp):
    return train(hp, Breaks())


@use
def tied_over_a_break(hp):
    class TiedBreak(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.w(x).tanh()
            print("", end="")
            torch._dynamo.graph_break()
            return self.head(self.w(h))

    return train(hp, TiedBreak())


@use
def branches_on_data(hp):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.one(x) if x.mean() > 0 else self.two(x)
            return self.head(h)

    model = Branches()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for sign in (1, -1, 1):
        losses.append(step(call, optimizer, inputs().abs() * sign, targets()))
    return losses, model, optimizer


@use
def flags_that_change_the_graph(hp):
    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.extra, self.mode = nn.Linear(16, 4), nn.Linear(16, 4), "plain"

        def forward(self, x, scale=1.0):
            out = self.net(x) * scale
            return out + self.extra(x) if self.mode == "extra" else out

    model = Flagged()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for mode, scale in (("plain", 1.0), ("extra", 1.0), ("extra", 0.5), ("plain", 0.25)):
        model.mode = mode
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs(), scale=scale), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def an_annealed_scalar(hp):
    """A float and an int that are others at each call."""
    class Annealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, temperature, number):
            return self.net(x) / temperature + 0.01 * number

    model = Annealed()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for number in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs(), 2.0 * 0.9 ** number, number), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def slices_that_move(hp):
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x, start):
            return self.net(x[:, start:start + 4])

    model = Window()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for start in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs(), start), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


Pair = namedtuple("Pair", "loss logits")


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.net, self.make = mlp(), make

    def forward(self, x, y):
        out = self.net(x)
        return self.make(F.mse_loss(out, y), out)


def _returning(hp, make, loss_of):
    model = Returns(make)
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        out = call(inputs(), targets())
        optimizer.zero_grad()
        loss_of(out).backward()
        optimizer.step()
        seen.append(out)
    return seen, model, optimizer


@use
def returns_dicts(hp):
    return _returning(hp, lambda loss, out: {"loss": loss, "deep": [out, None, 3, {"x": out.argmax(-1)}]}, lambda o: o["loss"])


@use(refused={"parts": "backward has a gradient for another output than the loss"})
def returns_dataclasses_and_named_tuples(hp):
    return (_returning(hp, Output, lambda o: o.loss + o.logits.square().mean()),
            _returning(hp, Pair, lambda o: o.loss), type(hp.compile(Returns(Pair))(inputs(), targets())).__name__)


@use
def several_outputs_of_which_one_trains(hp):
    return _returning(hp, lambda loss, out: (loss, out.sum(), out.detach(), out.flip(0)), lambda o: o[0] * 2)


@use
def outputs_that_share_memory(hp):
    """A view, an input, the same tensor twice."""
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            out = self.net(x)
            return out, out.t(), out, x, out[1:3]

    model = Shares()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        outs = call(inputs())
        optimizer.zero_grad()
        (outs[0].square().mean() + outs[1].sum() * 0.1 + outs[4].mean()).backward()
        optimizer.step()
    return outs, model, optimizer


@use
def outputs_changed_in_place(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        out = call(inputs())
        out.mul_(2).clamp_(-1, 1)
        optimizer.zero_grad()
        F.mse_loss(out, targets()).backward()
        optimizer.step()
    return out, model


@use
def inputs_changed_in_place(hp):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, log):
            x.mul_(0.5)
            out = self.net(x)
            log[0] = out.detach().mean()
            return out

    model = Writes()
    call, optimizer, x, log = hp.compile(model), sgd(model), inputs(), torch.zeros(2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(call(x, log), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, x, log, model


@use
def hidden_layers_kept_aside(hp):
    """Features stored on the module in forward, used by the loss."""
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.features = nn.Linear(16, 16), nn.Linear(16, 4), None

        def forward(self, x):
            self.features = self.body(x).tanh()
            return self.head(self.features)

    model = Keeps()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets()) + 0.1 * model.features.abs().mean()
        loss.backward()
        optimizer.step()
    return loss, model.features, model


@use
def batches_of_other_sizes(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    return [step(call, optimizer, inputs(rows), targets(rows)) for rows in (8, 8, 6, 8, 3)], model, optimizer


@use
def lengths_that_vary(hp):
    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.embed(ids).tanh().mean(1))

    model = Pools()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for length in (6, 4, 7, 6):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(tokens(4, length)), classes(4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def a_batch_of_one_row(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    return [step(call, optimizer, inputs(1), targets(1)) for _ in range(2)], call(inputs(1)), model


@use
def evaluates_between(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 4))
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        seen.append(step(call, optimizer, inputs(), targets()))
        model.eval()
        with torch.no_grad():
            seen.append(call(inputs(6)))
        with torch.inference_mode():
            seen.append(call(inputs(5)).clone())
        model.train()
    return seen, model, optimizer


@use
def inference_before_training(hp):
    model = mlp()
    with torch.no_grad():
        seen = [hp.compile(model)(inputs())]
    return seen, train(hp, model), hp.compile(model)(inputs())


@use
def partly_without_gradients(hp):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                h = self.body(x)
            return self.head(h) + self.head(h.detach() * 2).detach()

    return train(hp, Half())


@use
def generates_tokens(hp):
    """Greedy decoding: each call one token longer."""
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids):
            return self.head(self.embed(ids).cumsum(1))

    model = Small()
    call, optimizer = hp.compile(model), sgd(model)
    F.cross_entropy(call(tokens()).flatten(0, 1), tokens().roll(1, 1).flatten()).backward()
    optimizer.step()
    ids = tokens(2, 3)
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, call(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    return ids, model


@use
def with_a_cache_of_keys(hp):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.register_buffer("keys", torch.zeros(2, 6, 8))
            self.register_buffer("values", torch.zeros(2, 6, 8))

        def forward(self, x, at):
            q, k, v = self.qkv(x).chunk(3, -1)
            self.keys[:, at], self.values[:, at] = k, v
            seen = torch.arange(6) <= at
            scores = torch.einsum("bd,bkd->bk", q, self.keys).masked_fill(~seen, float("-inf"))
            return torch.einsum("bk,bkd->bd", scores.softmax(-1), self.values)

    model = Cached()
    call = hp.compile(model)
    with torch.no_grad():
        outs = [call(inputs(2, 8) * (at + 1), at) for at in range(4)]
    return outs, model


@use
def hooks_of_modules(hp):
    model = mlp()
    seen = []
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda m, args: (args[0].tanh(),))
    model[4].register_forward_hook(lambda m, args, out: seen.append(out.detach().mean()))
    return train(hp, model), seen


@use
def hooks_of_parameters(hp):
    def bound(p):
        p.grad.clamp_(-0.01, 0.01)

    model = mlp()
    seen = []
    handle = model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[2].weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    model[4].bias.register_post_accumulate_grad_hook(bound)
    first = train(hp, model, steps=2)
    handle.remove()
    return first, seen, train(hp, model, steps=1)


@use
def hooks_after_the_first_step(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    step(call, optimizer, inputs(), targets())
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(grad.abs().sum().item()) or grad / 2)
    step(call, optimizer, inputs(), targets())
    return sorted(seen), model, optimizer


@use
def checkpointed(hp):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(outs=16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    return train(hp, Checkpointed())


@use
def checkpointed_around_the_call(hp):
    model = mlp()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(checkpoint(call, inputs(), use_reentrant=False), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use
def gradient_asked_for_by_name(hp):
    model = mlp()
    call = hp.compile(model)
    loss = F.mse_loss(call(inputs()), targets())
    some = torch.autograd.grad(loss, [model[0].weight, model[4].bias], retain_graph=True)
    rest = torch.autograd.grad(loss, [model[2].weight])
    return some, rest, model


@use
def backward_twice_over_one_graph(hp):
    model = mlp()
    call = hp.compile(model)
    out = call(inputs())
    out.mean().backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    out.square().mean().backward()
    return first, model


@use
def backward_in_parts(hp):
    model = mlp()
    call = hp.compile(model)
    one, two = call(inputs()), call(inputs().flip(0))
    torch.autograd.backward([one.mean(), two.square().sum()], [torch.tensor(2.0), torch.tensor(0.5)])
    return model


@use
def the_loss_compiled_with_the_model(hp):
    model = mlp()
    call = hp.compile(lambda x, y: F.mse_loss(model(x), y))
    optimizer, losses = adamw(model), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(inputs(), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def only_a_part_compiled(hp):
    body, head = mlp(outs=16), nn.Linear(16, 4)
    call = hp.compile(body)
    optimizer, losses = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(head(call(inputs()).tanh()), targets())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, body, head, optimizer


@use
def a_method_compiled(hp):
    class Has(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def loss(self, x, y):
            return F.mse_loss(self.net(x), y)

    model = Has()
    call, optimizer = hp.compile(model.loss), sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(inputs(), targets())
        loss.backward()
        optimizer.step()
    return loss, model


@use
def per_sample_gradients_compiled(hp):
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(16, 4)

    def loss_of(parameters, x, y):
        return F.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

    call = hp.compile(lambda parameters, x, y: vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y))
    return call({n: p.detach() for n, p in model.named_parameters()}, inputs(), targets())


@use
def rows_chosen_by_a_mask(hp):
    """How many rows there are depends on the data."""
    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, keep):
            return self.net(x[keep])

    model = Selects()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for keep in (classes() > 0, classes() > 1):
        optimizer.zero_grad()
        out = call(inputs(), keep)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use
def exceptions_are_the_scripts(hp):
    """A forward that raises for some input leaves everything as it was."""
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return self.net(x)

    model = Raises()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for rows in (8, 3, 8):
        try:
            seen.append(step(call, optimizer, inputs(rows), targets(rows)))
        except ValueError as error:
            seen.append(str(error))
    return seen, model, optimizer
