"""Outputs beside the loss move to a graph of their own if they are larger than what that graph needs, and it is safe."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.graph.graph_copy import copy_graph
from passes.transforms.outputs import split_outputs
from passes.transforms.outputs.split_outputs import OutputSplit

X, Y = torch.linspace(-1, 1, 32 * 4).view(32, 4), torch.arange(32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.wide = nn.Linear(4, 4), nn.Linear(4, 64), nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(()))

    def hidden(self, x):
        return torch.tanh(self.body(x))


def split_of(forward: Any, monkeypatch: Any) -> tuple[Any, Any, OutputSplit | None, list[Any]]:
    """The graph that Dynamo makes, before and after, what was split off, and the graph's inputs."""
    monkeypatch.setattr(split_outputs, "LEAST_BYTES", 512)
    found: list[Any] = []

    def backend(gm, inputs):
        before = copy_graph(gm)
        found.append((before, gm, split_outputs.split_outputs(gm), list(inputs)))
        return before

    torch._dynamo.reset()
    torch.compile(forward, backend=backend)(Net(), X, Y)
    return found[0]


def plain(net, x, y):
    logits = net.head(net.hidden(x))
    return F.cross_entropy(logits, y), logits


def capped(net, x, y):
    logits = torch.tanh(net.head(net.hidden(x)) / 3).double() * 3
    return F.cross_entropy(logits, y), logits


def of_rows(net, x, y):
    """The view is not kept, but what it is a view of."""
    logits = net.head(net.hidden(x).view(2, 16, 4)[:, 0:])
    return F.cross_entropy(logits.flatten(0, 1), y), logits, y


def twice(net, x, y):
    logits, probabilities = plain(net, x, y)[1], net.head(net.hidden(x)).softmax(-1)
    return logits, F.cross_entropy(logits, y), probabilities, logits


def after_a_context(net, x, y):
    with torch.no_grad():
        scale = net.head.weight.abs().mean()
    logits = net.head(net.hidden(x)) * scale
    return F.cross_entropy(logits, y), logits


def relu_in_place_before(net, x, y):
    return plain(net, F.relu(x * 1, inplace=True), y)


@pytest.mark.parametrize("forward, places, sources", [
    (plain, ((1, 0),), 1), (capped, ((1, 0),), 1), (of_rows, ((1, 0),), 1), (twice, ((0, 0), (2, 1)), 2),
    (after_a_context, ((1, 0),), 2), (relu_in_place_before, ((1, 0),), 1)], ids=lambda x: getattr(x, "__name__", ""))
def test_the_two_graphs_together_compute_the_same(forward, places, sources, monkeypatch):
    before, first, split, inputs = split_of(forward, monkeypatch)
    assert split is not None and (split.places, split.added) == (places, sources)

    expected = list(before(*inputs))
    results = list(first(*inputs))
    rest = split.rest(*results[-sources:], *(inputs[k] for k in split.takes))
    merged = results[:-sources]
    for position, place in split.places:
        merged.insert(position, rest[place])

    torch.testing.assert_close(merged, expected, rtol=0, atol=0)
    assert sum(x.numel() for x in results[-sources:]) < sum(x.numel() for x in rest)
    torch.testing.assert_close(list(split.whole(*inputs)), expected, rtol=0, atol=0)


def no_loss(net, x, y):
    logits = net.head(net.hidden(x))
    return F.cross_entropy(logits, y, reduction="none"), logits


def small(net, x, y):
    return F.cross_entropy(net.head(net.hidden(x)), y), net.hidden(x)[:2]


def dropped_out(net, x, y):
    logits = F.dropout(net.head(net.hidden(x)), 0.5)
    return F.cross_entropy(logits, y), logits


def changed_later(net, x, y):
    logits = net.head(net.hidden(x))
    loss = F.cross_entropy(logits, y)
    logits += 1
    return loss, logits


def assigned_later(net, x, y):
    logits = net.head(net.hidden(x)) * 1
    loss = F.cross_entropy(logits, y)
    logits[0] = 0.0
    return loss, logits


def changed_later_by_position(net, x, y):
    logits = net.head(net.hidden(x))
    loss = F.cross_entropy(logits, y)
    return loss + F.selu(logits, True).detach().sum(), logits


def dropped_out_later_by_position(net, x, y):
    logits = net.head(net.hidden(x))
    loss = F.cross_entropy(logits, y)
    return loss + F.dropout(logits.detach(), 0.5, True, True).sum(), logits


def hidden_changed_later(net, x, y):
    hidden = net.hidden(x)
    logits = net.head(hidden)
    return F.cross_entropy(logits, y) + hidden.detach().mul_(2).sum(), logits


def two_products(net, x, y):
    logits = net.wide(net.head(net.hidden(x)))
    return F.cross_entropy(logits, y), logits


def without_gradients(net, x, y):
    loss, _ = plain(net, x, y)
    with torch.no_grad():
        return loss, net.head(net.hidden(x))


def by_a_buffer_that_changes(net, x, y):
    logits = net.head(net.hidden(x)) * net.seen
    net.seen.add_(1)
    return F.cross_entropy(logits, y), logits


def under_autocast(net, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net.head(net.hidden(x))
    return F.cross_entropy(logits.float(), y), logits


def an_input(net, x, y):
    large = x.expand(64, 32, 4)
    return F.cross_entropy(net.head(net.hidden(x)), y), large


@pytest.mark.parametrize("forward", [
    no_loss, small, dropped_out, changed_later, assigned_later, changed_later_by_position,
    dropped_out_later_by_position, hidden_changed_later, two_products, without_gradients,
    by_a_buffer_that_changes, under_autocast, an_input], ids=lambda x: x.__name__)
def test_other_graphs_stay_as_they_are(forward, monkeypatch):
    before, after, split, _ = split_of(forward, monkeypatch)

    assert split is None
    assert str(before.graph) == str(after.graph)
