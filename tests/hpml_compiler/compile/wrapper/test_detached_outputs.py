"""Outputs beside the loss are compiled without a gradient; one that arrives all the same is eager mode's."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

import hpml_compiler
import hpml_compiler.compile.wrapper.detached_outputs as wrapper
from passes.errors import HpmlError
from passes.transforms.outputs import outputs_beside_loss
from tests.helpers.peaks import least_peak

X, Y = torch.arange(48, dtype=torch.float64).view(6, 8).sin(), torch.arange(6)


class Net(nn.Module):
    """Returns its loss, predictions, and what a second head makes. Dropout, and statistics that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(8, 16).double(), nn.BatchNorm1d(16).double()
        self.head, self.other = nn.Linear(16, 32).double(), nn.Linear(16, 4).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = F.dropout(torch.tanh(self.norm(self.body(x))), 0.3)
        logits = self.head(hidden)
        return F.cross_entropy(logits, y), logits * 2, self.other(hidden).sin()


@pytest.fixture(autouse=True)
def compiled_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Detached outputs of each graph that is compiled. Outputs of any size are detached, and buffers stay after backward."""
    found: list[tuple[int, ...]] = []
    detach = wrapper.detach_results
    monkeypatch.setattr(outputs_beside_loss, "LEAST_BYTES", 0)
    monkeypatch.setattr(wrapper, "detach_results", lambda gm, positions: found.append((*positions,)) or detach(gm, positions))
    return found


def hooked(loss: Any, logits: Any, _: Any) -> Any:
    logits.register_hook(lambda gradient: gradient * 3)
    logits.retain_grad()
    (loss + logits.square().mean()).backward()
    return logits.grad


def described(loss: Any, logits: Any, other: Any) -> Any:
    assert logits.requires_grad and not logits.is_leaf and logits.grad_fn is not None
    loss.backward()
    return logits.detach() + other.detach().sum()


def twice(loss: Any, logits: Any, _: Any) -> None:
    (loss + logits.sum()).backward(retain_graph=True)
    (loss + logits.exp().mean()).backward()


def scaled(loss: Any, logits: Any, _: Any) -> None:
    torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss + logits.mean()).backward()


USES = {
    "the loss": lambda loss, logits, other: loss.backward(),
    "both": lambda loss, logits, other: (loss + logits.square().mean()).backward(),
    "logits alone": lambda loss, logits, other: logits.square().mean().backward(),
    "logits, in two terms": lambda loss, logits, other: (loss + logits.exp().mean() - logits[1].sum()).backward(),
    "the other head": lambda loss, logits, other: (loss + other.sum()).backward(),
    "after the loss": lambda loss, logits, other: (loss.backward(retain_graph=True), logits.sum().backward())[0],
    "twice": twice,
    "changed in place": lambda loss, logits, other: other.mul_(2).square().sum().backward(),
    "autograd.grad": lambda loss, logits, other: torch.autograd.grad(loss + logits.sum(), [logits, loss])[0],
    "hooks": hooked,
    "scaled": scaled,
    "described": described,
}


def states(model: nn.Module) -> list[torch.Tensor | None]:
    return [*(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}, {"outputs": "whole"}], ids=str)
@functorch.patch(donated_buffer=False)  # as torch asks for with retain_graph=True
def test_gradients_at_any_output_are_those_of_eager_mode(options, compiled_for):
    for first in ("the loss", "both", "the other head"):
        hpml_compiler.reset()
        eager = Net()
        model = copy.deepcopy(eager)
        call, start = torch.compile(model, backend="hpml", options={"compiler": "eager", **options}), len(compiled_for)
        for name in (first, *USES, "the loss", "both"):
            found = []
            for each, run in ((eager, eager), (model, call)):
                each.zero_grad(set_to_none=True)
                torch.manual_seed(1)
                found.append([USES[name](*run(X, Y)), *states(each), torch.rand(1)])
            torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
        assert len(compiled_for) - start <= 3 and compiled_for[start] == (1, 2)


def test_accumulated_and_checkpointed_gradients_are_those_of_eager_mode(compiled_for):
    eager = Net()
    model = copy.deepcopy(eager)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager"})
    for uses_both in (False, True, True):
        for each, run in ((eager, eager), (model, call)):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            terms = [run(X + k, Y) for k in range(3)]
            terms += [checkpoint(run, X, Y, use_reentrant=False)]
            for loss, logits, _ in terms:
                (loss + logits.square().mean() if uses_both else loss).backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)
    assert compiled_for == [(1, 2), (2,)]


class Attention(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = super().forward(x).view(1, 1, 6, 8)
        made = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        return made.square().mean(), made


def test_a_graph_compiled_for_a_late_gradient_draws_as_eager_mode_does():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Attention(8, 8).double()
        call = torch.compile(model, backend="hpml", options={"compiler": "eager"}) if compiled else model
        for _ in range(3):
            call(X)[1].sin().sum().backward()
            found.append(torch.get_rng_state())
        found.append(model.weight.grad)
    torch.testing.assert_close(found[4:], found[:4], rtol=1e-12, atol=1e-13)


def test_gradients_go_to_the_inputs_that_a_script_computed():
    class Mixed(Net):
        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one, two, three, y = inputs
            logits = self.head(self.body(one * two)) + one.sum() - three.mean()
            return F.cross_entropy(logits, y), (logits * three.sum()).sin()

    found = []
    for compiled in (False, True):
        model, leaves = Mixed(), [(X * k).requires_grad_() for k in (1, 2, 3)]
        run: Any = torch.compile(model, backend="hpml", options={"compiler": "eager"}) if compiled else model
        for _ in range(2):
            loss, logits = run(leaves[0] * 2, leaves[1].T.contiguous().T, leaves[2], Y)
            (loss + logits.square().sum()).backward()
        found.append([*(p.grad for p in model.parameters()), *(x.grad for x in leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)


def test_values_that_changed_before_the_first_gradient_are_refused():
    def parameter(model: nn.Module, x: torch.Tensor) -> None:
        torch.optim.SGD(model.parameters(), 0.1).step()

    def through_data(model: Any, x: torch.Tensor) -> None:
        model.body.weight.data.mul_(2)

    for change in (parameter, through_data, lambda _, x: x.zero_()):
        hpml_compiler.reset()
        model, x = Net(), X.clone()
        loss, logits, _ = torch.compile(model, backend="hpml", options={"compiler": "eager"})(x, Y)
        loss.backward(retain_graph=True)
        change(model, x)
        with pytest.raises(HpmlError, match="modified by an inplace operation: output mul"):
            logits.sum().backward()
    loss, logits, _ = torch.compile(model, backend="hpml", options={"compiler": "eager"})(X, Y)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        logits.sum().backward()


def test_logits_that_backward_needs_are_not_changed_unnoticed():
    def squares(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x @ weight
        return logits.square().mean(), logits

    for options in ({}, {"memory_budget": "1GiB"}):
        hpml_compiler.reset()
        call = torch.compile(squares, backend="hpml", options={"compiler": "eager", **options})
        loss, logits = call(X, nn.Parameter(X.T.clone()))
        logits.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_graphs_that_change_what_they_read_keep_gradients_at_all_outputs(compiled_for):
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(16, dtype=torch.float64))

        def forward(self, x, y):
            self.shift.add_(1)
            logits = self.head(self.body(x) + self.shift)
            return F.cross_entropy(logits, y), logits

    torch.compile(Counting(), backend="hpml", options={"compiler": "eager"})(X, Y)[0].backward()
    assert not compiled_for


def test_logits_beside_the_loss_take_no_memory_for_their_gradient():
    class Model(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.body, self.head, self.both = nn.Linear(64, 256), nn.Linear(256, 256), both

        def forward(self, x, y):
            logits = self.head(torch.relu(self.body(x)))
            loss = F.cross_entropy(logits, y)
            return (loss, logits) if self.both else (loss,)

    x, y, peaks = torch.randn(1024, 64), torch.randint(0, 256, (1024,)), {}
    for both in (False, True):
        model = Model(both)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager"})

        def step(call: Any = call, model: nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            call(x, y)[0].backward()

        step()
        peaks[both] = least_peak(step, model, torch.optim.SGD(model.parameters()))
    assert peaks[True] - peaks[False] < 0.2 * 1024 * 256 * 4, peaks
