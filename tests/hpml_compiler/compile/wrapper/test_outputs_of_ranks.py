"""Logits beside the loss on two ranks -> not computed unless they are read, and then as on one device."""
from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hpml_compiler.compile.wrapper import deferred_outputs
from hpml_compiler.runtime.outputs.output_wrapper import OutputUses
from hpml_compiler.runtime.outputs.recorded_output import RecordedOutput
from passes.session_state import state_of
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import Doubled, full

X = torch.arange(64 * 8).view(64, 8) % 53
Y = (X * 7) % 1024
STEPS = 3


class Head(nn.Module):
    """Tied to the embedding, or not; soft-capped."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(1024, 32).double(), nn.Linear(32, 32).double()
        self.head = nn.Linear(32, 1024, bias=False).double()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.body(self.embed(x))))
        logits = 5 * torch.tanh(logits / 5)
        return F.cross_entropy(logits.view(-1, 1024), y.reshape(-1)), logits


def step(call, optimizer, then=lambda loss, logits: None):
    optimizer.zero_grad()
    loss, logits = call(X, Y)
    found = then(loss, logits)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits, found


def unread(call, optimizer):
    return [step(call, optimizer)[0] for _ in range(STEPS)]


def read_at_once(call, optimizer):
    accuracy = lambda _, logits: (logits.argmax(-1) == Y).double().mean()  # noqa: E731
    return [step(call, optimizer, accuracy)[2] for _ in range(STEPS)]


def read_after_the_step(call, optimizer):
    return [logits.detach().sum(-1) for _, logits, _ in [step(call, optimizer) for _ in range(STEPS)]]


def read_after_the_next_call(call, optimizer):
    logits = [step(call, optimizer)[1] for _ in range(STEPS)]
    return [x.detach().clone() for x in logits]


def copied_and_pickled(call, optimizer):
    logits = step(call, optimizer)[1]
    return [copy.deepcopy(logits.detach()), pickle.loads(pickle.dumps(logits.detach().clone()))]


def gradient_through_the_logits(call, optimizer):
    losses = []
    for _ in range(STEPS):
        loss, logits = call(X, Y)
        optimizer.zero_grad()
        (loss + logits.square().mean()).backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def other_sizes(call, optimizer):
    first = step(call, optimizer)[0]
    with torch.no_grad():
        loss, logits = call(X[:32], Y[:32])
    loss.backward() if loss.requires_grad else None
    return [first, loss, logits.sum(), step(call, optimizer)[0]]


def read_in_many_steps(call, optimizer):
    maximum = lambda _, logits: logits.detach().amax()  # noqa: E731
    return [step(call, optimizer, maximum)[2] for _ in range(deferred_outputs.READS_ON_RANKS + 3)]


def gradient_after_the_step(call, optimizer):
    """The parameters that the logits were computed with are gone: an error, as in eager mode."""
    _, logits = call(X, Y)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        logits.square().mean().backward()
    return []


def changed_in_place(call, optimizer):
    loss, logits = call(X, Y)
    logits[0] = 0
    (loss + logits.exp().mean()).backward()
    return [loss.detach(), logits.detach()]


def in_autograd_functions_and_checkpoints(call, optimizer):
    loss, logits = call(X, Y)
    square = lambda x: x.square().mean()  # noqa: E731
    total = loss + Doubled.apply(logits).sin().mean() + logits.cos().mean() + sum(
        checkpoint(square, logits, use_reentrant=reentrant) for reentrant in (False, True))
    total.backward()
    optimizer.step()
    return [total.detach()]


def under_hooks_of_saved_tensors(call, optimizer):
    def read(x, y):
        loss, logits = call(x, y)
        return loss + logits.argmax(-1).double().mean(), logits

    found = []
    for around in (call, read, lambda x, y: (call(x, y)[0], call(x, y)[1].square().mean())):
        found += [step(functools.partial(checkpoint, around, use_reentrant=False), optimizer)[0] for _ in range(2)]
    with save_on_cpu():
        return [*found, step(call, optimizer, lambda loss, logits: logits.max())[0]]


SCENES = (unread, read_at_once, read_after_the_step, read_after_the_next_call, copied_and_pickled, gradient_through_the_logits,
          other_sizes, read_in_many_steps, changed_in_place,
          gradient_after_the_step, in_autograd_functions_and_checkpoints, under_hooks_of_saved_tensors)
REPORTED = {unread: (0,), read_at_once: (STEPS, "argmax at test_outputs_of_ranks.py")}
"""Scenes in which a report is checked: calls in which the logits were made, and the functions of the script that read them."""


def run(rank, options, tied, scenes):
    for scene in scenes:
        results = []
        for compiled in (False, True):
            model = Head(tied)
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options}) if compiled else model
            if compiled:
                assert type(call(X, Y)[1]) is RecordedOutput, scene
            found = scene(call, optimizer)
            results.append([[full(x) for x in found], [full(p.detach()) for p in model.parameters()]])
        torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-11,
                                   msg=lambda told, scene=scene: f"{scene.__name__}: {told}")
        if scene in REPORTED:
            use = state_of(OutputUses)["graph_0", 1]
            made, *lines = REPORTED[scene]
            assert use.calls == STEPS + 1 and use.made == made and not use.gathers, (scene, use)
            assert [where.split(":")[0] for where in use.reads] == lines and (lines or "never read" in use.described()), use
        kind = type(call(X, Y)[1])
        assert (kind is RecordedOutput) == (scene is not read_in_many_steps), (scene, kind)
        fresh()


@pytest.mark.parametrize(("options", "tied", "scenes"), [
    ({"mesh": {"dp": 2}}, True, SCENES[::2]), ({"mesh": {"tp": 2}}, False, SCENES[1::2]),
    ({"mesh": {"dp": 2}, "memory_budget": "1GiB"}, True, (gradient_through_the_logits, read_in_many_steps)),
    ({"mesh": {"dp": 2}, "microbatches": 2}, True, (unread, read_at_once, under_hooks_of_saved_tensors))],
    ids=["dp", "tp", "budget", "microbatches"])
def test_logits_are_as_on_one_device(launch, options, tied, scenes):
    launch(run, world_size=2, args=(options, tied, scenes), timeout_s=300)


class TwoHeads(Head):
    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(32, 1024).double()

    def forward(self, x, y):
        return *super().forward(x, y), self.aside(self.embed(x))


def run_two_heads(rank):
    found = []
    for options in (None, {"compiler": "eager", "mesh": {"dp": 2}}):
        model = TwoHeads()
        call = torch.compile(model, backend="hpml", options=options) if options else model
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.5)
        missing = []
        for k in range(deferred_outputs.READS_ON_RANKS + 2):
            loss, logits, aside = call(X, Y)
            (loss + logits.square().mean() if k < deferred_outputs.READS_ON_RANKS else loss).backward()
            missing.append([name for name, p in model.named_parameters() if p.grad is None])
            optimizer.step()
            optimizer.zero_grad()
        found.append([missing, [full(p.detach()) for p in model.parameters()]])
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-10, atol=1e-11)


def test_gradients_that_eager_mode_lacks_are_missing_where_all_outputs_are_computed(launch):
    launch(run_two_heads, world_size=2)
