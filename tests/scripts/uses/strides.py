"""Where in memory the tensors are that a compiled graph returns, as far as a script can tell."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw
from tests.scripts.use import use


def images(rows=4):
    return torch.linspace(-1, 1, rows * 3 * 16 * 16).view(rows, 3, 16, 16).mul(9).sin()


FORMS = {
    "permuted": lambda h, x: h.flatten(2).transpose(1, 2),
    "permuted_twice": lambda h, x: h.permute(3, 0, 2, 1) * 2,
    "channels_last": lambda h, x: h.tanh().contiguous(memory_format=torch.channels_last),
    "expanded": lambda h, x: h.mean(1, keepdim=True).tanh().expand(-1, 5, -1, -1),
    "expanded_rows": lambda h, x: h.mean(0, keepdim=True).tanh().expand(4, -1, -1, -1),
    "sliced": lambda h, x: h.tanh()[:, 2:5],
    "sliced_rows": lambda h, x: h.tanh()[1:3],
    "stepped": lambda h, x: h.tanh()[:, ::2, :, 1:],
    "chunk": lambda h, x: h.tanh().chunk(2, 1)[1],
    "windows": lambda h, x: h.tanh().flatten(2).unfold(2, 4, 2),
    "view_of_input": lambda h, x: x[:, 1:].transpose(1, 2),
    "input": lambda h, x: x,
    "selected": lambda h, x: h.tanh()[:, 3],
    "diagonal": lambda h, x: h.tanh().diagonal(0, 2, 3),
    "whole_statistic": lambda h, x: h.transpose(0, 1).flatten(1).std(1, keepdim=True).t().expand(3, 8),
}


class Views(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.conv, self.names = nn.Conv2d(3, 8, 4, 4), names

    def forward(self, x):
        h = self.conv(x)
        return {name: FORMS[name](h, x) for name in self.names}


def looks(out):
    return {name: [list(t.shape), list(t.stride()), t.storage_offset(), t.is_contiguous(),
                   t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last),
                   t.as_strided([1], [1], t.storage_offset()).clone(), F.dropout(t, 0.5)] for name, t in out.items()}


def _seen(hp, names, **options):
    model, seen = Views(names), []
    call, optimizer = hp.compile(model, **options), adamw(model)
    for _ in range(2):
        out = call(images())
        seen.append(looks(out))
        sum(t.square().mean() for t in out.values() if t.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, model


@use
def of_each_alone(hp):
    """Other outputs may be left in parts, or share memory with one."""
    return [_seen(hp, [name]) for name in ("permuted", "expanded", "sliced", "channels_last")]


@use
def of_all_together(hp):
    return _seen(hp, list(FORMS))


@use
def of_most_by_inductor(hp):
    """Without those in which one element stands in several places."""
    names = [name for name in FORMS if name not in ("windows", "expanded", "expanded_rows", "whole_statistic")]
    return _seen(hp, names, compiler="inductor")


class Broken(nn.Module):
    """DETR's features become tokens before a graph break; dropout draws in their order in memory."""

    def __init__(self, form):
        super().__init__()
        self.conv, self.head, self.form = nn.Conv2d(3, 8, 4, 4), nn.LazyLinear(1), form

    def forward(self, x):
        h = FORMS[self.form](self.conv(x), x)
        torch._dynamo.graph_break()
        return self.head(F.dropout(h, 0.5).flatten(1)).square().mean()


@use
def across_a_break(hp):
    seen = []
    for form in ("permuted", "channels_last", "sliced", "expanded"):
        model = Broken(form)
        model(images())
        call = hp.compile(model)
        loss = call(images())
        loss.backward()
        seen.append((loss, model))
    return seen
