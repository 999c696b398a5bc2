"""Scripts on two ranks, compiled by inductor -> one device's results; errors that all ranks get. More: tests/scripts."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpml_compiler
from hpml_compiler.session import session
from tests.hpml_compiler.runtime.common import assert_close, assert_same_parameters, full

Call = Callable[..., Any]
MESHES = ({"dp": 2}, {"tp": 2})
# In float64 a difference is a mistake, not rounding.
X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16).sin()
Y = torch.linspace(1, -1, 8 * 4, dtype=torch.float64).view(8, 4).cos()


def compiled(model: nn.Module, mesh: dict[str, int] | None = None, **options: Any) -> Call:
    torch._dynamo.reset()
    session.reset()
    pinned = {} if mesh is None else {"mesh": mesh}
    return torch.compile(model, backend="hpml", options={"compiler": "eager", **pinned, **options})


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def step(call: Call, optimizer: torch.optim.Optimizer, x: torch.Tensor = X, y: torch.Tensor = Y) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(call(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


# --- scripts: (model, what to call) -> what they saw ------------------------------------------------------------------


def plain(model: nn.Module, call: Call) -> list[Any]:
    optimizer = adamw(model)
    return [step(call, optimizer) for _ in range(3)]


def gradients_of_inputs(model: nn.Module, call: Call) -> list[Any]:
    x = X.clone().requires_grad_()
    F.mse_loss(call(x), Y).backward()
    (again,) = torch.autograd.grad(call(x).square().sum(), x)
    return [x.grad, again]


def compare(script: Callable[[nn.Module, Call], list[Any]], model: nn.Module, mesh: dict[str, int] | None,
            compiler: str = "eager") -> None:
    reference = copy.deepcopy(model)
    expected = script(reference, reference)
    actual = script(model, compiled(model, mesh, compiler=compiler))
    assert hpml_compiler.last_plan().graphs, "the backend was used"
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(torch.as_tensor(full(ours)), torch.as_tensor(full(theirs)), atol=1e-9)
    assert_same_parameters(model, reference, atol=1e-9)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert_close(ours, theirs, atol=1e-9)


# --- models -----------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Statistics(nn.Module):
    """BatchNorm's buffers, and one of the script's own."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.abs().sum()
        return self.b(self.norm(self.a(x)))


def run_inductor(rank):
    rows, columns = MESHES
    compare(gradients_of_inputs, net(), rows, "inductor")
    for kind, mesh in ((Checkpointed, rows), (Statistics, columns)):
        torch.manual_seed(0)
        compare(plain, kind().double(), mesh, "inductor")


@pytest.mark.timeout(280)
def test_models_with_inductor(launch):
    launch(run_inductor, world_size=2, timeout_s=240)


# --- what goes wrong, goes wrong loudly -------------------------------------------------------------------------------


def run_different_graphs(rank):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU() if rank else nn.Tanh(), nn.Linear(16, 4)).double()
    with pytest.raises(Exception, match="(?s)rank.*(tanh|relu)") as error:
        compiled(model)(X).sum().backward()
    return str(error.value)


def test_ranks_with_different_graphs_are_told_the_first_difference(launch):
    for message in launch(run_different_graphs, world_size=2):
        assert "tanh" in message or "relu" in message


def run_other_plan(rank, folder):
    model = net()
    compiled(model, {"dp": 2})(X).sum().backward()
    path = f"{folder}/plan.json"
    if rank == 0:
        hpml_compiler.last_plan().save(path)
    dist.barrier()
    same = net()
    compiled(same, plan=path)(X).sum().backward()
    assert dict(hpml_compiler.last_plan().mesh) == {"dp": 2}
    with pytest.raises(Exception, match="plan"):
        compiled(nn.Linear(16, 4).double(), plan=path)(X).sum().backward()
    with pytest.raises(Exception, match="(?s)mesh.*3.*2"):
        compiled(net(), {"dp": 3})(X)
    with pytest.raises(Exception, match="(?s)memory_bugdet.*memory_budget"):
        compiled(net(), memory_bugdet=1)(X)
    with pytest.raises(Exception, match="the step needs at least"):
        compiled(net(), memory_budget=64)(X).sum().backward()
    compare(plain, net(), {"tp": 2})  # nothing of it is left behind


def test_a_plan_comes_back_and_bad_input_is_said(launch, tmp_path):
    launch(run_other_plan, world_size=2, args=(str(tmp_path),))
