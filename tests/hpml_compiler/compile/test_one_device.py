"""What scripts do on one device, with options that have hpml decide something there -> eager torch's result, or a word."""
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
