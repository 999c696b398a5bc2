"""A call that runs out of memory -> it is repeated under a smaller plan, with the numbers of a run that had enough."""
from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpml_compiler.compile.recovery import optimizer_room
from hpml_compiler.runtime.process.out_of_memory import StepTooLarge, memory_failure
from hpml_compiler.runtime.watchdog.attribution import is_distributed
from hpml_compiler.session import session
from tests.helpers.frozen import fresh
from tests.helpers.out_of_memory import failures
from tests.hpml_compiler.runtime.common import full

REPLAN = {"compiler": "eager", "on_oom": "replan"}
WIDTH, ROWS = 16, 1024


class Small(nn.Module):
    """Dropout, running statistics, and the loss inside or outside."""

    def __init__(self, loss: bool = True, norm=nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down, self.loss = nn.Linear(WIDTH, 4 * WIDTH), norm(4 * WIDTH), nn.Linear(
            4 * WIDTH, WIDTH), loss

    def forward(self, x):
        x = self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.2, self.training))
        return x.square().mean() if self.loss else x


def trained(options, half="", at=(), step_of_failure=1, loss=True, between=lambda model: None, steps=3, norm=nn.BatchNorm1d,
            late=False, **settings):
    """Losses, gradients, parameters and buffers; and how often it failed. late: only after the model's own forward."""
    fresh()
    with failures() as failing:
        model = Small(loss, norm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
        call = torch.compile(model, backend="hpml", options=options)
        x, seen = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin(), []
        torch.manual_seed(1)
        for step in range(steps):
            fails = step == step_of_failure and half
            if fails and not late:
                failing.arm(half, *at)
            out = call(x)
            if fails and late:
                failing.arm(half, *at)
            out = out if loss else out.square().mean()
            between(model)
            out.backward()
            seen += [out.detach().clone(), *(full(p.grad).clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        assert not failing.armed
        return [*seen, *(full(p.detach()).clone() for p in model.parameters()), *model.buffers()], failing.failed


@pytest.mark.parametrize(("half", "at", "step", "loss"), [
    ("forward", (5,), 1, False), ("backward", (5,), 0, True), ("backward", (5, 1), 1, False)])
def test_a_call_is_repeated(half, at, step, loss, caplog):
    expected, _ = trained({"compiler": "eager"}, loss=loss)
    with caplog.at_level(logging.WARNING, "hpml"):
        found, failed = trained(REPLAN, half, at, step, loss)
    assert failed == len(at)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    (line,) = (each.message for each in caplog.records if "nothing is lost" in each.message)
    assert line.startswith(f"{half} of graph_0: it ran out of memory (it tried to allocate 1.00 GiB)")
    (graph,) = session.last_plan().graphs[-1:]
    assert graph.kept is not None, "what runs now is planned under a budget"


def test_each_failure_leaves_less_to_the_next_plan():
    trained(REPLAN, "forward", (5, 1), 1)
    peak = session.last_plan().graphs[0].memory.peak
    budgets = [graph.kept.budget_bytes for graph in session.last_plan().graphs]
    assert budgets[-1] < peak < budgets[0]


def test_without_the_option_the_error_is_raised():
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 GiB"):
        trained({"compiler": "eager"}, "forward", (5,))


def test_what_changed_since_forward_is_not_repeated():
    with pytest.raises(StepTooLarge, match=r"cannot be repeated: input \d was changed in place since its forward"):
        trained(REPLAN, "backward", (5,), between=lambda model: model.norm.running_mean.add_(1))


@pytest.mark.parametrize("offloads", [False, True])
def test_an_optimizer_without_room_steps_in_parts(monkeypatch, caplog, offloads):
    expected, _ = trained({"compiler": "eager"}, foreach=True)
    largest = 4 * WIDTH * WIDTH * 4
    monkeypatch.setattr(optimizer_room, "fits", lambda nbytes: nbytes <= (4 if offloads else 6) * largest)
    with caplog.at_level(logging.WARNING, "hpml"):
        found, _ = trained(REPLAN, foreach=True)
    assert all(map(torch.equal, found, expected))
    (line,) = (each.message for each in caplog.records if "steps a part" in each.message)
    assert ("offloaded" in line) == offloads
    if offloads:  # less than a part of the step needs: refused before anything changes
        monkeypatch.setattr(optimizer_room, "fits", lambda nbytes: nbytes <= 2 * largest)
        with pytest.raises(StepTooLarge, match=r"its state offloaded, it still needs 12(\.0)? KiB; nothing was changed"):
            trained(REPLAN, foreach=True)
        monkeypatch.setattr(optimizer_room, "fits", lambda nbytes: nbytes <= 4 * largest)
        monkeypatch.setattr(optimizer_room, "mapped_files_count", lambda: True)
        with pytest.raises(StepTooLarge, match=r"its state offloaded, it still needs 29\.6 KiB; nothing was changed"):
            trained(REPLAN, foreach=True)


def on_one_rank(rank, half, microbatches, axes):
    found = []
    for axis, at in axes.items():
        options = {"mesh": {axis: 2}, "microbatches": microbatches, "compiler": "eager"}
        norm = nn.BatchNorm1d if microbatches == 1 else nn.LayerNorm
        expected, _ = trained(options, norm=norm)
        seen, failed = trained({**options, "on_oom": "replan"}, half if rank == 1 else "", (at,), norm=norm)
        found.append((all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True)), failed))
    return [*found, _in_graph_of_loss(rank, half)]


def _in_graph_of_loss(rank, half):
    """In step 0, in the graph of the script's own loss, not yet part of the model's. It is repeated with microbatches."""
    before, options = torch.get_default_dtype(), {"mesh": {"dp": 2}, "compiler": "eager"}
    torch.set_default_dtype(torch.float64)
    try:
        expected, _ = trained(options, loss=False, norm=nn.LayerNorm)
        seen, failed = trained({**options, "on_oom": "replan"}, half if rank == 1 else "", (1,), 0, False,
                               norm=nn.LayerNorm, late=True)
    finally:
        torch.set_default_dtype(before)
    running = [graph for graph in session.last_plan().graphs if graph.kept is not None]
    same = all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(seen, expected, strict=True))
    return same and len(running) == 1, failed


@pytest.mark.parametrize(("half", "microbatches", "axes"), [("forward", 2, {"dp": 7, "pp": 3}), ("backward", 1, {"dp": 7})])
def test_all_ranks_repeat_what_one_failed_in(launch, half, microbatches, axes):
    one, other = launch(on_one_rank, 2, (half, microbatches, axes))
    assert set(one) == {(True, 0)} and set(other) == {(True, 1)} and len(one) == len(axes) + 1


def test_errors_of_memory():
    assert memory_failure(RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you "
                                       "tried to allocate 4096 bytes. Error code 12")) == (
        "it ran out of memory (it tried to allocate 4096 bytes)")
    assert memory_failure(MemoryError("Unable to allocate 15.3 MiB for an array")) == (
        "it ran out of memory (it tried to allocate 15.3 MiB)"), "NumPy's"
    assert all(map(memory_failure, (MemoryError("std::bad_alloc"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"),
                                    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))))
    assert memory_failure(RuntimeError("shapes cannot be multiplied")) == ""
    assert not is_distributed(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. "
                                           "frame #4: c10d::ProcessGroupGloo"))
