"""Training scripts that know nothing of stages -> a pipeline on ranks, with the numbers of one device."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hpml_compiler.runtime.process.device_clock import HostClock
from hpml_compiler.runtime.program.stage_timer import recording
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import full

ROWS = 8


class Tied(nn.Module):
    """A table that is looked up at first and multiplied by in the end, blocks with dropout, uneven labels, and logits."""

    def __init__(self, p: float = 0.2):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(p), nn.Linear(16, 8)) for _ in range(4)])

    def forward(self, tokens, labels):
        first = x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x) * first
        logits = x @ self.table.weight.t()
        return F.cross_entropy(logits, labels), logits


class Outside(Tied):
    """The loss is computed by the script; rows mix in BatchNorm, whose buffers change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens, labels):
        x = self.norm(self.table(tokens))
        for block in self.blocks:
            x = x + block(x)
        return x


class Short(Tied):
    """For inductor, which takes long."""

    def __init__(self):
        super().__init__()
        del self.blocks[2:]


class Logits(Tied):
    """The loss is computed by the script."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels)[1]


class Drawn(Tied):
    """What is drawn depends on what the model computes."""

    def forward(self, tokens, labels):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x[:, torch.multinomial(x.detach().abs().mean(0), 4)].square().mean(), x


def batch(rows: int = ROWS):
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 16, (rows,)), torch.randint(0, 16, (rows,))
    labels[1] = labels[4:6] = -100
    return tokens, labels


def train(model, call):
    """Losses, norms, logits, buffers, what the script draws afterwards, an evaluation; at every step another loss scale."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    torch.manual_seed(2)
    seen = []
    model.train()
    for step in range(3):
        optimizer.zero_grad()
        out = call(*batch())
        loss, logits = out if isinstance(out, tuple) else (out.square().mean(), out)
        (loss * (step + 1)).backward()
        seen += [loss.detach(), logits.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
    seen.append(torch.rand(2))
    model.eval()
    with torch.no_grad():
        out = call(*batch(6))
        seen.append(out[-1])
    return [*seen, *(x.detach() for x in model.state_dict().values())]


def trained(rank, cases):
    for kind, reference, options in cases:
        fresh()
        torch.manual_seed(0)
        ours = kind().double()
        theirs = copy.deepcopy(ours)
        found = train(ours, torch.compile(ours, backend="hpml", options=options))
        expected = train(theirs, theirs if reference == "eager" else torch.compile(theirs, backend=reference))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.full_tensor() if isinstance(a, DTensor) else a, b, rtol=1e-9, atol=1e-11,
                                       msg=lambda text, at=(kind.__name__, options): f"{at}: {text}")


def test_four_ranks_give_and_draw_what_one_device_does(launch):
    """Losses, and what the script draws after the steps, with dropout in every block."""
    launch(trained, 4, ([(kind, "eager", {"compiler": "eager", **options}) for kind, options in (
        (Tied, {"mesh": {"pp": 4}, "microbatches": 4}),
        (Tied, {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}),
        (Outside, {"mesh": {"dp": 2, "pp": 2}, "schedule": "gpipe", "zero": 3}),
    )],))


@pytest.mark.timeout(200)
def test_two_ranks_give_what_one_device_gives(launch):
    launch(trained, 2, ([(kind, "eager", {"mesh": {"pp": 2}, "compiler": "eager", **options}) for kind, options in (
        (Outside, {"microbatches": 2}), (Tied, {"microbatches": 2, "virtual_stages": 2}), (Drawn, {}),
        (Logits, {"microbatches": 4, "schedule": "zero_bubble"}),
        (Tied, {"microbatches": 4, "schedule": "zbv", "virtual_stages": 2}),
    )],), timeout_s=180)


@pytest.mark.timeout(240)
def test_inductor_with_its_own_random_numbers(launch):
    launch(trained, 2, ([(Short, "inductor", {"mesh": {"pp": 2}, "microbatches": 2})],), timeout_s=220)


def evaluated(rank, *cases):
    for options, counts in cases:
        evaluate(rank, options, counts)


def evaluate(rank, options, counts):
    fresh()
    torch.manual_seed(0)
    model = Tied().double()
    alone = copy.deepcopy(model).eval()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    call(*batch())[0].backward()
    model.eval()
    for rows in counts:
        with torch.no_grad(), recording(HostClock()) as loops:
            found = call(*batch(rows))
        for a, b in zip(found, alone(*batch(rows)), strict=True):
            torch.testing.assert_close(full(a), b, rtol=1e-12, atol=1e-12)
        (loop,) = loops  # through the stages that have the parameters: nothing is borrowed
        done = [each.action for each in loop.done()]
        assert {(action.kind, action.stage) for action in done} == {("forward", rank // len(options["mesh"]))}
        assert len(done) == (2 if rows % 2 == 0 else 1)
    with torch.inference_mode():
        torch.testing.assert_close(call(*batch())[0], alone(*batch())[0], rtol=1e-12, atol=1e-12)


def test_an_evaluation_goes_through_the_stages_that_were_trained(launch):
    stages = {"mesh": {"pp": 2}, "microbatches": 2}
    launch(evaluated, 2, ((stages, (ROWS, 6, 5)), ({**stages, "schedule": "zero_bubble"}, (ROWS,))))


def test_an_evaluation_through_stages_that_are_split(launch):
    launch(evaluated, 4, (({"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}, (ROWS, 5)),))
