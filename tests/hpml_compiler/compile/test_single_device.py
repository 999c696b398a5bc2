"""Scripts on one device, with options that hpml acts on there -> eager torch's result, or an error."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hpml_compiler

OPTIONS = [{}, {"memory_budget": "1GiB"}, {"microbatches": 2}]


def compiled(model: nn.Module, **options):
    hpml_compiler.reset()
    return torch.compile(model, backend="hpml", options={"compiler": "eager", **options})


class Teacher(nn.Module):
    """An average of its own weights, written by `.data` while it computes."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            theirs.data = theirs.data * 0.9 + ours.data * 0.1
        return (self.student(x) - self.teacher(x)).square().mean()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_data_of_a_parameter_is_written_in_forward(options):
    model = Teacher().double()
    eager, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.double)
    call = compiled(model, **options)
    for run in (call, call, eager, eager):
        run(x).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_sparse_gradients_are_refused_with_what_to_do(options):
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(Exception, match="sparse=False"):
        compiled(model, **options)(torch.arange(4))


SCALAR_CHANGES = {
    "in place": lambda seen, x: seen.add_(1),
    "in place, twice": lambda seen, x: seen.mul_(2).add_(1),
    "copied from itself": lambda seen, x: seen.copy_(seen + 1),
    "copied from what is computed": lambda seen, x: seen.copy_(x.detach().sum()),
    "a mean that moves": lambda seen, x: seen.lerp_(x.detach().mean().to(seen.dtype), 0.1),
    "filled": lambda seen, x: seen.fill_(7.5),
    "as out=": lambda seen, x: torch.add(seen, 1, out=seen),
    "by index": lambda seen, x: seen.__setitem__((), 7.5),
}


class Scalar(nn.Module):
    """A buffer of no dims that forward changes, and reads or not; `factor` is a Python float, which may change."""

    def __init__(self, change, read: bool, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.change, self.read, self.factor = change, read, 0.5
        self.register_buffer("seen", torch.ones((), dtype=dtype))

    def forward(self, x):
        x = self.linear(x)
        self.change(self.seen, x)
        loss = x.square().mean() * self.factor
        return loss * self.seen if self.read else loss


def losses_and_buffer(model: Scalar, call) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for step in range(4):
        model.factor = (0.5, 0.5, 0.25, 0.125)[step]
        loss = call(torch.randn(4, 4, dtype=torch.double))
        loss.backward()
        losses.append(loss.item())
    return [*losses, float(model.seen)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize("change", SCALAR_CHANGES)
def test_a_changed_buffer_of_no_dims_has_its_new_value(change, read, dtype):
    """Dynamo takes one in float64 for a Python float (`compat.allow_scalar_mutation`)."""
    model = Scalar(SCALAR_CHANGES[change], read, dtype)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(losses_and_buffer(model, compiled(model)), losses_and_buffer(eager, eager), rtol=1e-6, atol=1e-9)


def test_inductor_writes_a_changed_buffer_of_no_dims_in_float64():
    model = Scalar(SCALAR_CHANGES["in place"], True, torch.float64)
    eager = copy.deepcopy(model)
    call = compiled(model, compiler="inductor")
    torch.testing.assert_close(losses_and_buffer(model, call), losses_and_buffer(eager, eager), rtol=1e-6, atol=1e-9)
