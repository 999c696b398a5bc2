"""Replicas that train apart -> a plain loop of LocalSGD and DiLoCo on one device, with one model for each replica."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpml_compiler
from hpml_compiler.instruments.sent_bytes import SentBytes
from tests.helpers.frozen import fresh

ROWS, WIDTH, STEPS, APART = 8, 8, 5, 2
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}, "local_steps": {"dp": APART}, "monitor": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(12, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12)  # its bias: the gradient is of the loss alone
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        logits = self.head(x)
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 12, (2, ROWS, 3), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def simulated(outer: str, clip: bool, replicas: int = 2) -> list[torch.Tensor]:
    """Losses of each step over all rows, and the parameters after it on replica 0."""
    models = [Net() for _ in range(replicas)]
    optimizers = [optimizer_of(model) for model in models]
    before = copy.deepcopy(models[0])
    lr, momentum = {"average": (1.0, 0.0), "nesterov": (0.7, 0.9), "nesterov:0.5:0.25": (0.5, 0.25)}[outer]
    outer_step = torch.optim.SGD(before.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        losses = []
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = slice(k * ROWS // replicas, (k + 1) * ROWS // replicas)
            optimizer.zero_grad()
            loss = model(tokens[own], labels[own])
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        if (step + 1) % APART == 0:
            for p, *parts in zip(before.parameters(), *(model.parameters() for model in models), strict=True):
                p.grad = p.detach() - torch.stack([part.detach() for part in parts]).mean(0)
            outer_step.step()
            for model in models:
                model.load_state_dict(before.state_dict())
        seen += [torch.stack(losses).mean(), *(p.detach().clone() for p in models[0].parameters())]
    return seen


def trained(options: dict[str, Any], outside: bool, clip: bool) -> list[torch.Tensor]:
    fresh()
    model = Net()
    optimizer = optimizer_of(model)
    call, seen = torch.compile(model, backend="hpml", options=OPTIONS | options), []
    for step in range(STEPS):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        loss = loss_of(call(tokens), labels) if outside else call(tokens, labels)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += [loss.detach(), *(local(p) for p in model.parameters())]
    return [(x.full_tensor() if isinstance(x, DTensor) else x).clone() for x in seen]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Normed(nn.Module):
    """Dropout, a mean over rows that are not masked, and a square of a mean over rows: sums over the rows of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return normed_loss(self.head(nn.functional.dropout(self.hidden(x), 0.3)), labels)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.up(x)))


def normed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    shares = logits.softmax(1).mean(0)
    return nn.functional.cross_entropy(logits, labels, ignore_index=0) + shares.square().sum()


def normed_apart(replicas: list[Normed], x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of the batch where rows of each replica are computed with its parameters."""
    def each(values: torch.Tensor, call: Any) -> torch.Tensor:
        return torch.cat([call(model, part) for model, part in zip(replicas, values.chunk(len(replicas)), strict=True)])

    hidden = nn.functional.dropout(each(x, Normed.hidden), 0.3)
    return normed_loss(each(hidden, lambda model, part: model.head(part)), labels)


def sums_over_all_rows(rank: int) -> float:
    """Greatest difference of losses and parameters where the loss has other sums than a mean over rows."""
    fresh()
    models, model = [Normed() for _ in range(2)], Normed()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (*models, model)]
    call, worst = torch.compile(model, backend="hpml", options=OPTIONS), 0.0
    for step in range(4):
        drawn = torch.Generator().manual_seed(step)
        x, labels = torch.randn(ROWS, WIDTH, generator=drawn), torch.randint(0, 3, (ROWS,), generator=drawn)
        losses = []
        for run, given, times in ((normed_apart, (models, x, labels), 2), (call, (x, labels), 1)):
            torch.manual_seed(step)
            losses.append(run(*given))
            (times * losses[-1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % APART == 0:
            with torch.no_grad():
                for parts in zip(*(each.parameters() for each in models), strict=True):
                    torch._foreach_copy_(list(parts), [torch.stack(list(parts)).mean(0)] * 2)
        pairs = [(losses[0].detach(), losses[1].detach()), *zip(models[rank].parameters(), map(local, model.parameters()))]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst


CASES: dict[str, dict[str, Any]] = {
    "average": {},
    "average, loss outside, clipped": {},
    "nesterov": {"outer_optimizer": "nesterov"},
    "nesterov, inductor": {"outer_optimizer": "nesterov:0.5:0.25", "compiler": "inductor"},
    "microbatches": {"microbatches": 2},
    "budget, clipped": {"memory_budget": "64MiB"},
}


def on_ranks(rank: int, names: list[str]) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        clip = "clipped" in name
        expected = simulated({**{"outer_optimizer": "average"}, **CASES[name]}["outer_optimizer"], clip)
        seen = trained(CASES[name], "outside" in name, clip)
        each = len(expected) // STEPS
        # between averages, rank 1 has parameters of its own
        compared = [k for k in range(len(expected)) if rank == 0 or k % each == 0 or (k // each + 1) % APART == 0]
        found[name] = max(float((seen[k] - expected[k]).abs().max()) for k in compared)
    found["sums over all rows"] = sums_over_all_rows(rank)
    return found


def resumed(rank: int, folder: str, options: dict[str, Any]) -> tuple[list[float], list[float], float, int]:
    """Losses and parameters after step 3 of 7 of one run, and of another that resumes from its checkpoint of that step, in the
    middle between two averages; how far the first losses are from those of plain replicas; the bytes that gradients send."""
    torch.set_default_dtype(torch.float64)
    runs, losses, sent = [], list[float](), SentBytes()
    expected = simulated("nesterov", False, options["mesh"]["dp"])
    for stops in (False, True):
        fresh()
        model = Net()
        optimizer = optimizer_of(model)
        call = torch.compile(model, backend="hpml", options=OPTIONS | {"outer_optimizer": "nesterov"} | options)
        checkpointer = hpml_compiler.Checkpointer(folder, model, optimizer, background=False)
        first, seen = checkpointer.resume() if stops else 0, []
        for step in range(first, 7):
            optimizer.zero_grad()
            loss = call(*batch(step))
            with sent:
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            seen += [float(loss.detach()), *(float(local(p).norm()) for p in model.parameters())] if step >= 3 else []
            if step == 2:
                checkpointer.save(2)
        checkpointer.close()
        runs.append(seen)
    each = len(expected) // STEPS
    apart = max(abs(loss - float(other)) for loss, other in zip(losses, expected[::each]))
    return runs[0], runs[1], apart, sent.total


def both_resumed(rank: int, folder: str) -> list[tuple[list[float], list[float], float, int]]:
    return [resumed(rank, f"{folder}/{k}", options) for k, options in enumerate(
        ({"mesh": {"dp": 4}}, {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2}))]


def test_a_checkpoint_has_what_replicas_have_of_their_own(launch, tmp_path):
    for whole, stages in launch(both_resumed, 4, (str(tmp_path / "run"),)):
        assert whole[-1] == 0, "no gradients are sent"
        for once, again, apart, _ in (whole, stages):
            assert len(once) == len(again) > 4
            assert max(abs(a - b) for a, b in zip(once, again, strict=True)) < 1e-12
            assert apart < 1e-12


def test_replicas_train_as_plain_ones(launch):
    for found in launch(on_ranks, args=([*CASES],)):
        assert {name: apart for name, apart in found.items() if not apart < 1e-12} == {}
