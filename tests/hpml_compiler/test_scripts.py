"""Scripts written for one device -> the same losses, gradients, parameters and outputs on two ranks, with the backend."""
from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
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


def other_sizes(model: nn.Module, call: Call) -> list[Any]:
    optimizer, seen = adamw(model), []
    for rows in (8, 4, 6, 8):
        seen.append(step(call, optimizer, X[:rows], Y[:rows]))
        model.eval()
        with torch.no_grad():
            seen.append(call(X[:2]))
        with torch.inference_mode():
            seen.append(call(X[:5]).clone())
        model.train()
    return seen


def inference_first(model: nn.Module, call: Call) -> list[Any]:
    with torch.no_grad():
        seen: list[Any] = [call(X)]
    return [*seen, *plain(model, call), call(X).detach()]


def partly_frozen(model: nn.Module, call: Call) -> list[Any]:
    model[0].requires_grad_(False)
    seen = plain(model, call)
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)  # thawed later on, as in fine-tuning
    optimizer = adamw(model)
    return [*seen, *(step(call, optimizer) for _ in range(2))]


def from_a_checkpoint(model: nn.Module, call: Call) -> list[Any]:
    before = {k: full(v).clone() for k, v in model.state_dict().items()}
    optimizer = adamw(model)
    seen = [step(call, optimizer) for _ in range(2)]
    after = {k: full(v).clone() for k, v in model.state_dict().items()}
    model.load_state_dict(before)  # plain tensors into placed parameters
    seen.append(step(call, optimizer))
    model.load_state_dict(after)
    saved = copy.deepcopy(optimizer.state_dict())
    seen.append(step(call, optimizer))
    optimizer.load_state_dict(saved)
    return [*seen, step(call, optimizer)]


def accumulated_and_clipped(model: nn.Module, call: Call) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    seen = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            loss = F.mse_loss(call(X[4 * part:4 * part + 4]), Y[4 * part:4 * part + 4]) / 2
            loss.backward()
            seen.append(loss.item())
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        scheduler.step()
    return seen


def gradients_of_inputs(model: nn.Module, call: Call) -> list[Any]:
    x = X.clone().requires_grad_()
    F.mse_loss(call(x), Y).backward()
    (again,) = torch.autograd.grad(call(x).square().sum(), x)
    return [x.grad, again]


def called_twice_a_step(model: nn.Module, call: Call) -> list[Any]:
    optimizer = adamw(model)
    optimizer.zero_grad()
    loss = (call(X) - call(X.flip(0))).square().mean() + F.mse_loss(call(X[:4]), Y[:4])
    loss.backward()
    optimizer.step()
    return [loss.item()]


def averaged(model: nn.Module, call: Call) -> list[Any]:
    optimizer = adamw(model)
    step(call, optimizer)
    teacher = copy.deepcopy(model)
    step(call, optimizer)
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        norms = torch.stack([full(p).norm() for p in teacher.parameters()])
    return [norms, sum(full(p.square().sum()) for p in model.parameters())]


SCRIPTS = (plain, other_sizes, inference_first, partly_frozen, from_a_checkpoint, accumulated_and_clipped,
           gradients_of_inputs, called_twice_a_step, averaged)


def compare(script: Callable[[nn.Module, Call], list[Any]], model: nn.Module, mesh: dict[str, int] | None,
            compiler: str = "eager") -> None:
    reference = copy.deepcopy(model)
    expected = script(reference, reference)
    actual = script(model, compiled(model, mesh, compiler=compiler))
    assert hpml_compiler.last_plan().graphs, "the backend was used"
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(torch.as_tensor(full(ours)), torch.as_tensor(full(theirs)), atol=1e-9)
    assert_same_parameters(model, reference, atol=1e-9)


def run_scripts(rank):
    for script, mesh in zip(SCRIPTS, cycle(MESHES[::-1])):
        try:
            compare(script, net(), mesh)
        except Exception as error:
            raise AssertionError(f"script {script.__name__} on {mesh}") from error


@pytest.mark.timeout(150)
def test_scripts(launch):
    launch(run_scripts, world_size=2, timeout_s=120)


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


Pair = namedtuple("Pair", "loss logits")
KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "loss": lambda loss, y: loss,
    "tuple": lambda loss, y: (loss, y),
    "named tuple": Pair,
    "dict": lambda loss, y: {"loss": loss, "deep": [y, None, 3]},
    "dataclass": Output,
}


class Returns(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.net, self.kind = net(), kind

    def forward(self, x, y):
        out = self.net(x)
        return KINDS[self.kind](F.mse_loss(out, y), out)


def run_outputs(rank):
    for kind in KINDS:
        model = Returns(kind)
        reference = copy.deepcopy(model)
        call = compiled(model, {"dp": 2})
        seen = []
        for m, f in ((reference, reference), (model, call)):
            out = f(X, Y)
            assert type(out) is type(KINDS[kind](Y, Y)), kind
            loss = out if kind == "loss" else out["loss"] if kind == "dict" else out.loss if kind == "dataclass" else out[0]
            loss.backward()
            leaves = torch.utils._pytree.tree_leaves(vars(out) if kind == "dataclass" else out)
            seen.append([*leaves, *(p.grad for p in m.parameters())])
        for ours, theirs in zip(seen[1], seen[0], strict=True):
            if isinstance(theirs, torch.Tensor):
                assert_close(ours, theirs)
            else:
                assert ours == theirs, kind


def test_what_models_return(launch):
    launch(run_outputs, world_size=2)


class Breaks(nn.Module):
    """Two graph breaks, one of them on a value."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        h = self.b(h) + self.a(x)
        if h.sum().item() > 0:
            h = -h
        return self.c(h)


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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = torch.zeros_like(x)
        for k in range(3):
            h = self.cell(x.roll(k, 1), h)
        return self.head(h)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 4)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.head(self.down(self.up(x).relu()))


MODELS = (Breaks, Checkpointed, Statistics, Recurrent, Tied)


def run_buffers(rank):
    torch.manual_seed(0)
    model = Statistics().double()
    reference = copy.deepcopy(model)
    for m, f in ((reference, reference), (model, compiled(model, {"dp": 2}))):
        plain(m, f)
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(full(ours), theirs, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.timeout(150)
def test_models(launch):
    launch(run_models, world_size=2, timeout_s=120)


def run_models(rank):
    for kind, mesh in zip(MODELS, cycle(MESHES)):
        torch.manual_seed(0)
        try:
            compare(plain, kind().double(), mesh)
        except Exception as error:
            raise AssertionError(f"{kind.__name__} on {mesh}") from error


def run_inductor(rank):
    rows, columns = MESHES
    compare(gradients_of_inputs, net(), rows, "inductor")
    for kind, mesh in ((Checkpointed, rows), (Statistics, columns)):
        torch.manual_seed(0)
        compare(plain, kind().double(), mesh, "inductor")


@pytest.mark.timeout(280)
def test_models_with_inductor(launch):
    launch(run_inductor, world_size=2, timeout_s=240)


def test_buffers_are_those_of_the_whole_batch(launch):
    launch(run_buffers, world_size=2)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return F.dropout(self.down(self.up(x)), 0.5, self.training)


def run_dropout(rank):
    for mesh in MESHES:
        drops(mesh)


def drops(mesh):
    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        model = Dropped().double()
        call = compiled(model, mesh)
        torch.manual_seed(seed)
        outputs.append([call(X).detach().clone() for _ in range(2)])
    same, again, other = outputs
    for a, b in zip(same, again):
        assert torch.equal(a, b), "reproducible from the seed"
    assert not torch.equal(same[0], same[1]) and not torch.equal(same[0], other[0])
    everywhere = [torch.empty_like(same[0]) for _ in range(2)]
    dist.all_gather(everywhere, same[0])
    assert torch.equal(*everywhere), "every rank sees the same result"
    kept = same[0] != 0
    assert 0.35 < kept.float().mean() < 0.65
    halves = kept.chunk(2, 0) if "dp" in mesh else kept.chunk(2, 1)
    assert not torch.equal(*halves), "the two parts are dropped independently"
    model = Dropped().double()
    call = compiled(model, mesh)
    out = call(X)
    out.sum().backward()  # backward drops what forward dropped
    reference = Dropped().double()
    reference.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
    kept = (out.detach() != 0) * 2.0
    (reference.down(reference.up(X)) * kept).sum().backward()
    assert_close(model.up.weight.grad, reference.up.weight.grad)
    model.eval()
    torch.testing.assert_close(call(X), reference.eval()(X))


def test_dropout(launch):
    """Inductor's own numbers: see compile/test_random.py."""
    launch(run_dropout, world_size=2)


def run_autocast(rank):
    for mesh in MESHES:
        losses = []
        for make in (lambda m: m, lambda m, mesh=mesh: compiled(m, mesh)):
            model = net().float()
            call, optimizer = make(model), adamw(model)
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.mse_loss(call(X.float()), Y.float())
                loss.backward()
                assert all(p.grad.dtype == torch.float32 for p in model.parameters())
                optimizer.step()
                losses.append(loss.item())
        torch.testing.assert_close(losses[3:], losses[:3], rtol=2e-2, atol=1e-3)


def test_autocast(launch):
    launch(run_autocast, world_size=2)


def run_adversaries(rank):
    """Two models that train against each other, with an optimizer each."""
    results = []
    for compile_ in (lambda m: m, lambda m: torch.compile(m, backend="hpml", options={"compiler": "eager"})):
        session.reset()
        torch.manual_seed(0)
        maker, judge = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16)).double(), nn.Linear(16, 1).double()
        make, score = compile_(maker), compile_(judge)
        ours, theirs = adamw(maker), adamw(judge)
        for _ in range(2):
            theirs.zero_grad()
            (F.softplus(-score(X)).mean() + F.softplus(score(make(Y).detach())).mean()).backward()
            theirs.step()
            ours.zero_grad()
            F.softplus(-score(make(Y))).mean().backward()
            ours.step()
        results.append(nn.ModuleList([maker, judge]))
    assert_same_parameters(*results)


def test_two_models_and_two_optimizers(launch):
    launch(run_adversaries, world_size=2)


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

