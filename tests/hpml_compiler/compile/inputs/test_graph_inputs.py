"""Scripts whose compiled graphs get unusual inputs -> what one device gives: several models of one class, placed tensors that
are no parameters, inputs changed in place, gradients that would share memory."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpml_compiler.session import session
from tests.helpers.frozen import fresh
from tests.hpml_compiler.runtime.common import assert_close, assert_same_parameters, full

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16).sin()
Y = torch.linspace(1, -1, 8 * 4, dtype=torch.float64).view(8, 4).cos()
Compile = Callable[[Any], Any]
Seen = tuple[list[Any], Sequence[nn.Module]]


class Net(nn.Module):
    def __init__(self, width: int = 32, seed: int = 0, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(16, width, dtype=dtype), nn.Linear(width, 4, dtype=dtype)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def optimizer_of(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-2, eps=1e-4)


def in_turn(calls: Sequence[Any], models: Sequence[nn.Module], rounds: int = 2) -> list[float]:
    optimizers, seen = [optimizer_of(model) for model in models], []
    for _ in range(rounds):
        for call, optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(call(X), Y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


# --- several models of one class: Dynamo's cache is per code object ---------------------------------------------------


def other_widths(compiled: Compile) -> Seen:
    models = [Net(32), Net(64, 1), Net(48, 2)]
    return in_turn([compiled(model) for model in models], models, rounds=3), models


def one_not_placed(compiled: Compile) -> Seen:
    student, teacher = Net(), Net(seed=1).requires_grad_(False)
    call, target, optimizer, seen = compiled(student), compiled(teacher), optimizer_of(student), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            goal = target(X)
        loss = F.mse_loss(call(X), goal)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen += [loss.item(), call(X)]
    return seen, [student, teacher]


def a_copy(compiled: Compile) -> Seen:
    model = Net()
    call = compiled(model)
    seen = in_turn([call], [model])
    other = copy.deepcopy(model)
    calls = [call, compiled(other)]
    seen += in_turn(calls, [model, other])
    with torch.no_grad():
        for slow, fast in zip(other.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.5)
    return seen + in_turn(calls[::-1], [other, model]), [model, other]


def another_dtype(compiled: Compile) -> Seen:
    models = [Net(), Net(seed=1, dtype=torch.float32)]
    calls, seen = [compiled(model) for model in models], []
    for _ in range(2):
        for call, dtype in zip(calls, (torch.float64, torch.float32), strict=True):
            loss = F.mse_loss(call(X.to(dtype)), Y.to(dtype))
            loss.backward()
            seen.append(loss.double().item())
    return seen[::2], models[:1]


def replaced_by_hand(compiled: Compile) -> Seen:
    models = [Net(), Net(seed=1)]
    calls = [compiled(model) for model in models]
    seen = in_turn(calls, models)
    models[1].a.weight = nn.Parameter(torch.linspace(-1, 1, 32 * 16, dtype=torch.float64).view(32, 16).sin())
    seen += in_turn(calls, models)
    models[1].b = nn.Linear(32, 4, dtype=torch.float64)
    nn.init.constant_(models[1].b.weight, 0.1)
    nn.init.zeros_(models[1].b.bias)
    return seen + in_turn(calls[::-1], models[::-1]), models


# --- placed tensors that are no parameters of the graph ---------------------------------------------------------------


class Given(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(16, 16).double(), nn.Linear(16, 4).double()

    def forward(self, x, weight=None, mask=None, anchors=()):
        h = self.a(x) if weight is None else self.a(x) + x @ weight
        out = F.linear(torch.tanh(h), self.b.weight if mask is None else self.b.weight * mask, self.b.bias)
        return out, sum(((p - q) ** 2).sum() for p, q in zip(self.parameters(), anchors, strict=False))


def train_given(call: Any, optimizer: torch.optim.Optimizer, **given: Any) -> float:
    optimizer.zero_grad()
    out, penalty = call(X, **given)
    loss = F.mse_loss(out, Y) + penalty
    loss.backward()
    optimizer.step()
    return loss.item()


def weights_of_another(compiled: Compile) -> Seen:
    models = [Given(), Given(1)]
    (first, second), optimizer = [compiled(model) for model in models], optimizer_of(*models)
    seen = [train_given(first, optimizer)]
    weight = models[0].a.weight
    for make in (lambda: weight.t().detach() * 2, lambda: weight.t() * 2, lambda: weight, lambda: weight.t(), weight.detach):
        seen.append(train_given(second, optimizer, weight=make()))
    return seen, models


def masks_and_anchors(compiled: Compile) -> Seen:
    model = Given()
    call, optimizer = compiled(model), optimizer_of(model)
    seen = [train_given(call, optimizer)]
    anchors = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        seen.append(train_given(call, optimizer, mask=(model.b.weight.detach().abs() > 0.05).double()))
        seen.append(train_given(call, optimizer, anchors=anchors))
    return seen, [model]


def called_functionally(compiled: Compile) -> Seen:
    model = Net()

    def function(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    call, optimizer, seen = compiled(function), optimizer_of(model), []
    for scale in (None, None, 1.5):  # Dynamo finds the parameters in a dict of the script, before they are placed
        optimizer.zero_grad()
        loss = F.mse_loss(call({k: v if scale is None else v * scale for k, v in model.named_parameters()}, X), Y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen + in_turn([compiled(model)], [model]), [model]


class Heads(nn.Module):
    """18 rows in two parts in one mode, three heads of 6 in the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.out, self.heads = nn.Parameter(torch.randn(18, 16).double()), nn.Linear(18, 4).double(), False

    def forward(self, x):
        if self.heads:
            return self.out(torch.einsum("bi,hdi->bhd", x, self.w.view(3, 6, 16)).softmax(1).flatten(1))
        return self.out(x @ self.w.t())


def viewed_in_other_parts(compiled: Compile) -> Seen:
    model = Heads()
    call = compiled(model)
    seen = in_turn([call], [model])
    model.heads = True
    return seen + in_turn([call], [model]), [model]


# --- what a graph changes, and what it returns of its inputs ----------------------------------------------------------


class Momentum(nn.Module):
    def __init__(self, update: Callable[[torch.Tensor, torch.Tensor], Any]):
        super().__init__()
        self.q, self.k, self.update = Net(), Net(seed=1).requires_grad_(False), update
        self.register_buffer("average", torch.zeros(32, 16, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.k.parameters(), self.q.parameters(), strict=True):
                self.update(slow, fast)
            self.average.lerp_(self.q.a.weight, 0.1)
            target = self.k(x)
        return F.mse_loss(self.q(x), target)


def set_data(slow: torch.Tensor, fast: torch.Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


def momentum_encoders(compiled: Compile) -> Seen:
    models = [Momentum(update) for update in (
        set_data, lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1),
        lambda slow, fast: slow.mul_(0.9).add_(fast, alpha=0.1))]
    seen: list[Any] = []
    for model in models:
        call, optimizer = compiled(model), torch.optim.SGD(model.q.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = call(X)
            loss.backward()
            optimizer.step()
            seen += [loss.item(), model.average.clone()]
        with torch.no_grad():
            seen += [call(X), full(model.k.a.weight).clone()]  # another graph, of parameters that are placed by now
    return seen, models


class Late(nn.Module):
    """Trains two halves; later the one follows the other in forward."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.follow = Net(), Net(seed=1), False

    def forward(self, x):
        if self.follow:
            with torch.no_grad():
                for slow, fast in zip(self.k.parameters(), self.q.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                self.q.a.bias.clamp_(-0.1, 0.1)
        return self.q(x) - self.k(x)


def changed_after_it_was_placed(compiled: Compile) -> Seen:
    model = Late()
    call = compiled(model)
    seen = in_turn([call], [model])
    model.follow = True
    return seen + in_turn([call], [model]), [model]


class Queue(nn.Module):
    """The place in the queue is another number at each step."""

    def __init__(self, in_a_tensor: bool):
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(16, 4).double()
        self.register_buffer("queue", F.normalize(torch.randn(4, 32).double(), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long) if in_a_tensor else None)
        self.number = 0

    def forward(self, x):
        keys = F.normalize(self.l(x), dim=1)
        loss = (keys @ self.queue.clone().detach()).logsumexp(1).mean()
        at = self.number if self.at is None else int(self.at)
        self.queue[:, at:at + x.shape[0]] = keys.detach().t()
        if self.at is None:
            self.number = (at + x.shape[0]) % 32
        else:
            self.at[0] = (at + x.shape[0]) % 32
        return loss


def queues(compiled: Compile) -> Seen:
    models, seen = [Queue(False), Queue(True)], []
    for model in models:
        call, optimizer = compiled(model), optimizer_of(model)
        for k in range(10):  # more than Dynamo would compile anew
            optimizer.zero_grad()
            loss = call(X * (k + 1))
            loss.backward()
            optimizer.step()
            seen += [loss.item(), model.queue.clone()]
    return seen, models


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.z = nn.Parameter(torch.randn(8, 16).double()), nn.Parameter(torch.randn(8).double())

    def forward(self, x):
        return x @ self.w.t() + self.z, self.w, self.w.t(), self.w[1], self.z.view(2, 4), self.w.detach()


def views_of_parameters_returned(compiled: Compile) -> Seen:
    model = Returns()
    call, optimizer, seen = compiled(model), optimizer_of(model), []
    for _ in range(2):
        optimizer.zero_grad()
        out = call(X)
        sum((k + 1) * value.square().sum() for k, value in enumerate(out)).backward()
        seen += [*(full(value).detach().clone() for value in out), full(model.w.grad).clone()]
        optimizer.step()
    return seen, [model]


# --- gradients that would share memory --------------------------------------------------------------------------------


class Break(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.linspace(-1, 1, 16).double()) for _ in range(2))

    def forward(self, x):
        h = x + self.p
        torch._dynamo.graph_break()
        return h + self.q


class PassedThrough(Break):
    def __init__(self):
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.ones(8, 16).double()) for _ in range(2))

    def forward(self, x):
        return self.p + self.q + x


def shared_gradients(compiled: Compile) -> Seen:
    models, seen = [kind() for kind in (Break, PassedThrough) for _ in range(3)], []
    for number, model in enumerate(models):
        call, given = compiled(model), torch.ones(8, 16, dtype=torch.float64)
        if number % 3 == 2:
            model.p.register_hook(lambda gradient: gradient * 2)
        for _ in range(2):
            if number % 3 == 1:
                model.zero_grad()
            x = torch.zeros(8, 16, dtype=torch.float64, requires_grad=True)
            out = call(x)
            if number % 3 == 0:
                out.backward(given, retain_graph=True)
                model.p.grad.mul_(0.5)
            out.backward(given)
            for gradient in (model.p.grad, model.q.grad):
                gradient.mul_(0.5)
                seen += [full(model.p.grad).clone(), full(model.q.grad).clone(), x.grad.clone(), given.clone()]
    return seen, models


SCRIPTS = {
    "models of one class": (other_widths, one_not_placed, a_copy, another_dtype, replaced_by_hand),
    "placed inputs": (weights_of_another, masks_and_anchors, called_functionally, viewed_in_other_parts),
    "changed inputs": (momentum_encoders, changed_after_it_was_placed, queues),
    "outputs and gradients": (views_of_parameters_returned, shared_gradients),
}


def run(rank, cases):
    for script, mesh in cases:
        options: Any = {"compiler": "eager", "mesh": mesh}
        expected, references = script(lambda model: model)
        fresh()
        actual, models = script(lambda model, options=options: torch.compile(model, backend="hpml", options=options))
        try:
            assert session.current().graphs, "the backend was used"
            for ours, theirs in zip(actual, expected, strict=True):
                assert_close(torch.as_tensor(full(ours)), torch.as_tensor(full(theirs)), atol=1e-9)
            for model, reference in zip(models, references, strict=True):
                assert_same_parameters(model, reference, atol=1e-9)
        except AssertionError as error:
            raise AssertionError(f"{script.__name__} on {mesh}") from error


CASES = [*((script, {"tp": 2}) for scripts in SCRIPTS.values() for script in scripts),
         *((script, {"dp": 2}) for script in SCRIPTS["outputs and gradients"])]


@pytest.mark.timeout(200)
def test_unusual_inputs(launch):
    launch(run, args=(CASES,), timeout_s=180)
