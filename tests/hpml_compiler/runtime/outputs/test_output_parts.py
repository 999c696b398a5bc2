"""A sharded output of one graph, taken by the next graph -> nothing is gathered, and gradients are those of one device."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpml_compiler.runtime.dtensor import lazy_outputs
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.outputs.step_output import StepOutput
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import full

X = torch.linspace(-1, 1, 256 * 16, dtype=torch.float64).view(256, 16).sin()
Y = torch.arange(256) % 40


class Net(nn.Module):
    """Large logits, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 64).double(), nn.Linear(64, 512).double()

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Compiled:
    """Functions of a script: compiled, or as they are."""

    def __init__(self, options) -> None:
        self.model = Net()
        self.compile = (lambda call: torch.compile(call, backend="hpml", options=options)) if options else lambda call: call
        self.net, self.loss, self.norm = map(self.compile, (self.model, F.cross_entropy, lambda z: z.square().mean()))

    def broken(self, x, y):
        logits = self.model(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits, y) + logits.std()


def graph_break(hp):
    loss = hp.compile(hp.broken)(X, Y)
    loss.backward()
    return [loss]


def two_functions(hp):
    loss = hp.loss(hp.net(X), Y)
    loss.backward()
    return [loss]


def two_readers(hp):
    logits = hp.net(X)
    loss = hp.loss(logits, Y) + 2 * hp.norm(logits)
    loss.backward()
    return [loss]


def backward_twice(hp):
    loss = hp.loss(hp.net(X), Y)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def hooks_and_retained_gradient(hp):
    seen, logits = [], hp.net(X)
    logits.retain_grad()
    logits.register_hook(lambda g: seen.append(full(g).clone()) or 2 * g)
    hp.loss(logits, Y).backward()
    return [*seen, full(logits.grad)]


def gradient_of_the_output(hp):
    logits = hp.net(X)
    return [*map(full, torch.autograd.grad(hp.loss(logits, Y), [logits]))]


def backward_into_the_output(hp):
    logits = hp.net(X)
    hp.loss(logits, Y).backward(inputs=[logits])
    return [full(logits.grad)]


def detached_leaf(hp):
    logits = hp.net(X).detach().requires_grad_()
    hp.loss(logits, Y).backward()
    return [full(logits.grad)]


def without_gradients(hp):
    with torch.no_grad():
        return [hp.loss(hp.net(X), Y)]


def hooks_after_the_loss(hp):
    seen, logits = [], hp.net(X)
    loss = hp.loss(logits, Y)
    logits.register_hook(lambda g: seen.append(full(g).clone()))
    logits.retain_grad()
    loss.backward()
    first, logits.grad = full(logits.grad), None
    return [*seen, first, *([] if logits.grad is None else [logits.grad])]


IN_PARTS = (graph_break, two_functions, two_readers, backward_twice, gradient_of_the_output, backward_into_the_output,
            without_gradients, hooks_and_retained_gradient, hooks_after_the_loss)


def read_before(hp):
    """Compiled for parts, then called with an output that has been gathered, and changed in place."""
    losses = [hp.loss(hp.net(X), Y)]
    logits = hp.net(X)
    logits[0] += 1.0
    losses.append(hp.loss(logits, Y))
    sum(losses).backward()
    return losses


def read_between(hp):
    logits = hp.net(X)
    loss = hp.loss(logits, Y)
    best = logits.argmax(-1)
    loss.backward()
    return [loss, best]


def changed_by_the_next_graph(hp):
    logits = hp.net(X)
    hp.compile(lambda z: z.mul_(2))(logits)
    loss = hp.loss(logits, Y)
    loss.backward()
    return [loss]


def returned_by_the_next_graph(hp):
    logits = hp.net(X)
    rows = hp.compile(lambda z: (z.view(128, 2, 512), z.exp()))(logits)
    loss = hp.norm(rows[0]) + rows[1].mean()
    loss.backward()
    return [loss]


def gradient_of_a_read_output(hp):
    logits = hp.net(X)
    assert logits.tolist()
    loss = hp.loss(logits, Y) + logits.exp().mean()
    first = torch.autograd.grad(loss, logits, retain_graph=True)
    logits.retain_grad()
    loss.backward()
    return [*map(full, first), full(logits.grad)]


def gradient_of_a_changed_output(hp):
    logits = hp.net(X)
    loss = hp.loss(logits, Y)
    logits *= 2
    logits.retain_grad()
    loss = loss + logits.exp().mean()
    loss.backward()
    return [full(logits.grad)]


READ = (gradient_of_a_read_output, gradient_of_a_changed_output, detached_leaf, read_before,
        read_between, changed_by_the_next_graph, returned_by_the_next_graph)


def run(rank, options):
    gathered, joined = [], lazy_outputs.gathered_from_parts
    lazy_outputs.gathered_from_parts = lambda local, spec: gathered.append(tuple(spec.shape)) or joined(local, spec)
    for use in (*IN_PARTS, *READ):
        results = []
        for chosen in (None, options):
            hp = Compiled(chosen)
            use(hp)
            if use in IN_PARTS:
                gathered.clear()  # of the first step alone, whose output waits to be part of a loss
            found = use(hp)
            results.append([[full(x.detach()) for x in found], [None if p.grad is None else full(p.grad)
                                                                for p in hp.model.parameters()]])
        torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12,
                                   msg=lambda told, use=use: f"{use.__name__}: {told}")
        assert bool(gathered) == (use in READ), (use.__name__, gathered)
        assert isinstance(hp.net(X), (LazyOutput, StepOutput))
        gathered.clear()
        fresh()


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_the_next_graph_takes_outputs_as_they_are(launch, axis):
    launch(run, world_size=2, args=({"compiler": "eager", "mesh": {axis: 2}},), timeout_s=300)
