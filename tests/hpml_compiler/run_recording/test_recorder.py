"""Training scripts under a monitor -> its records; on one device, on two ranks, with errors and bad input."""
from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.run_records.run_history import read_run
from passes.errors import BadInput

TOKENS = torch.arange(4 * 16).view(4, 16) % 50


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def train(monitor, steps, loss_of=lambda found: F.cross_entropy(found.flatten(0, 1), TOKENS.roll(1, 1).flatten()), **options):
    model = Language()
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = loss_of(call(TOKENS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log(loss=loss, lr=0.1)
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _fresh():
    hpml_compiler.reset()
    torch._dynamo.reset()


def test_one_device(tmp_path):
    train(None, 1)  # compiling may start threads that stay
    torch._dynamo.reset()
    before, hook = threading.active_count(), sys.excepthook
    with hpml_compiler.Monitor(tmp_path / "run", interval=1e-6) as monitor:
        losses = train(monitor, 12)
        with pytest.raises(BadInput, match="a monitor is open already"):
            hpml_compiler.Monitor(tmp_path / "other")
    assert threading.active_count() == before and sys.excepthook is hook
    run = read_run(tmp_path / "run")
    assert run.series("loss") == [(k + 1.0, pytest.approx(losses[k])) for k in range(1, 12)]  # the first step has no start
    assert all(each["steps"] == 1 and each["memory"]["resident"] > 2**20 for each in run.windows)
    (last,) = run.windows[-1:]
    assert last["samples_per_s"] == pytest.approx(4 / last["step_s"]) and last["tokens_per_s"] == pytest.approx(
        64 / last["step_s"])
    flops = 3 * 2 * 64 * (32 * 32 + 32 * 50)
    assert last["mfu"] > 0 and run.series("mfu")[0][1] * run.series("step_s")[0][1] == pytest.approx(
        last["mfu"] * last["step_s"])
    peak = flops / (last["mfu"] * last["step_s"])
    assert 1e8 < peak < 1e14
    assert [each["event"] for _, each in run.events()] == ["compiled"] and run.state() == "ended"


def test_a_restart_appends_and_an_error_is_an_event(tmp_path):
    with pytest.raises(ZeroDivisionError), hpml_compiler.Monitor(tmp_path) as monitor:
        train(monitor, 3)
        raise ZeroDivisionError("of the script")
    with hpml_compiler.Monitor(tmp_path, start=1) as monitor:
        train(monitor, 4)
    run = read_run(tmp_path)
    assert len(run.attempts) == 2 and [each["step"] for each in run.windows] == [5]
    events = [(each["event"], each["text"]) for _, each in run.events()]
    assert ("failed", "ZeroDivisionError: of the script") in events and events[-1][0] == "restart"
    assert run.windows[-1]["samples_per_s"] > 0  # of a graph that was compiled under the first monitor


def test_losses_are_those_without_a_monitor_and_values_are_kept_as_they_were(tmp_path):
    plain = train(None, 5)
    hpml_compiler.reset()
    torch._dynamo.reset()
    total = torch.zeros(())
    with hpml_compiler.Monitor(tmp_path, interval=1e-6) as monitor:
        assert train(monitor, 5) == plain
        monitor.log(total=total)
        total += 1.0  # in place, later
    assert read_run(tmp_path).series("total") == [(5.0, 0.0)]


def _on_two_ranks(rank, folder):
    monitor = hpml_compiler.Monitor(folder, interval=1e-6)
    losses = train(monitor, 10, mesh={"dp": 2})
    report = hpml_compiler.last_report()
    if rank:
        time.sleep(0.05)
    monitor.close()
    return losses, report


def test_two_ranks(launch, tmp_path):
    (losses, report), _ = launch(_on_two_ranks, 2, (str(tmp_path),))
    run = read_run(tmp_path)
    assert dict(run.series("loss")) == {k + 1.0: pytest.approx(losses[k]) for k in range(1, 10)}
    assert sorted(run.ranks) == [0, 1] and not any(each.get("values") for each in run.ranks[1][0].windows)
    assert run.windows[-1]["mfu"] > 0 and run.windows[-1]["samples_per_s"] > 0 and run.ranks[1][0].end
    plan = hpml_compiler.Plan.load(run.plan_path)
    assert plan.mesh == {"dp": 2} and report.step_time.predicted > 0


@pytest.mark.parametrize(("given", "said"), [
    ({"sinks": "tensorboard"}, "sinks=.tensorboard. is no list"),
    ({"sinks": ["wandbb"]}, "unknown sink 'wandbb'"),
    ({"interval": 0}, "interval=0 is not a number of seconds above 0"),
    ({"start": -1}, "start=-1 is not a number of steps"),
    ({"folder": "/proc/none"}, "the records of the run cannot be written"),
])
def test_bad_input(tmp_path, given, said):
    with pytest.raises(BadInput, match=said):
        hpml_compiler.Monitor(**{"folder": tmp_path, **given})
    hpml_compiler.Monitor(tmp_path).close()  # nothing is left open


@pytest.mark.parametrize(("value", "said"), [
    (torch.ones(2), r"loss is a tensor of shape \[2\], not one number"), ("much", "loss is 'much', not a number")])
def test_bad_values(tmp_path, value, said):
    with hpml_compiler.Monitor(tmp_path) as monitor, pytest.raises(BadInput, match=said):
        monitor.log(loss=value)


def test_folder_is_made(tmp_path):
    hpml_compiler.Monitor(Path(tmp_path) / "a" / "b").close()
    assert read_run(tmp_path / "a" / "b").state() == "ended"
