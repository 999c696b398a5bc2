"""Hooks of DDP on a compiled model -> the losses of the option that they stand for, or an error that names it."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from hpml_compiler.integrations.comm_hooks import BUILT_IN, compression_of
from passes.errors import BadInput
from tests.helpers.frozen import fresh

X = torch.linspace(-1, 1, 8 * 6, dtype=torch.float64).view(8, 6).sin()
OPTIONS: dict[str, Any] = {"compiler": "eager", "mesh": {"dp": 2}, "zero": 0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def losses(model: nn.Module, call: Any, rows: torch.Tensor) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(rows)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def hooked(rank: int) -> dict[str, list[float]]:
    rows, found = X.chunk(2)[rank], {}
    given: dict[str, Any] = {"none": OPTIONS, "option": {**OPTIONS, "compress": {"dp": "fp16"}}}
    for name, options in given.items():
        fresh()
        model = Net().double()
        found[name] = losses(model, torch.compile(model, backend="hpml", options=options), X)
    fresh()
    model = Net().double()
    ddp = DDP(torch.compile(model, backend="hpml", options=OPTIONS))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found["DDP(compiled)"] = losses(model, ddp, rows)
    with pytest.raises(BadInput, match="has run already"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    fresh()
    model = Net().double()
    ddp = DDP(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found["compiled(DDP)"] = losses(model, torch.compile(ddp, backend="hpml", options=OPTIONS), rows)
    return found


def test_a_hook_does_what_its_option_does(launch):
    for found in launch(hooked):
        assert found["DDP(compiled)"] == pytest.approx(found["option"], abs=1e-12)
        assert found["compiled(DDP)"] == pytest.approx(found["option"], abs=1e-12)
        assert max(abs(a - b) for a, b in zip(found["option"], found["none"], strict=True)) > 1e-7


@pytest.mark.parametrize("hook", [powerSGD_hook.batched_powerSGD_hook, lambda state, bucket: None])
def test_other_hooks_are_refused(hook):
    with pytest.raises(BadInput, match="does not run") as caught:
        compression_of(hook, None, Net())
    assert "compress" in caught.value.next_step


def test_what_is_done_anyway_is_no_compression():
    assert compression_of(default_hooks.allreduce_hook, None, Net()) == {}
    assert compression_of(BUILT_IN.FP16_COMPRESS, None, Net()) == {"*": "fp16"}


def test_power_sgd_has_the_rank_of_its_state():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3)
    assert compression_of(powerSGD_hook.powerSGD_hook, state, Net()) == {"*": "powersgd:3"}
    state.use_error_feedback = False
    with pytest.raises(BadInput, match="powerSGD_hook does not run"):
        compression_of(powerSGD_hook.powerSGD_hook, state, Net())
