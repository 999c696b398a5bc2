"""Unmodified training scripts on two ranks, compared with one device; before -> after, the parameters are placed."""
from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from tests.helpers.frozen import in_turn
from tests.hpml_compiler.runtime.common import X, assert_close, assert_same_parameters, full, mlp
from tests.hpml_compiler.runtime.toy import Toy


class Net(nn.Module):
    """Tied weights, a frozen layer, BatchNorm's buffers, a scalar, and a size that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.frozen, self.norm, self.out = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.weight.requires_grad_(False)
        self.odd, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        hidden = self.norm(self.frozen(self.embedding(tokens))).relu()
        return self.head(self.out(hidden)) * self.scale + self.odd.sum()


def make_optimizer(kind, model):
    named = list(model.named_parameters())
    decayed = [p for name, p in named if "bias" not in name]
    others = [p for name, p in named if "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9), named
    optimizer = torch.optim.AdamW if kind == "adamw" else type("Mine", (torch.optim.AdamW,), {})
    return optimizer(groups, lr=0.01, eps=1e-3), named  # steps of unknown behavior see DTensors


def train(model, call, kind, steps=3, accumulate=1):
    optimizer, named = make_optimizer(kind, model)
    params = [p for _, p in named]  # the script keeps lists from before the first call
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    torch.manual_seed(1)
    seen = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            tokens, labels = torch.randint(0, 16, (6,)), torch.randint(0, 16, (6,))
            loss = nn.functional.cross_entropy(call(tokens), labels)
            loss.backward()
            seen.append(loss.item())
        norm = nn.utils.clip_grad_norm_(params, 0.5)
        seen.append(float(f"{norm:.6f}"))
        optimizer.step()
        scheduler.step()
    compiles = counters["stats"]["unique_graphs"]
    model.eval()
    with torch.no_grad():
        seen.append(call(torch.randint(0, 16, (4,))).sum().item())
    return seen, compiles, optimizer


def run_script(rank, kind, aot, accumulate):
    counters.clear()
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    backend = Toy(aot=aot)
    seen, compiles, optimizer = train(model, torch.compile(model, backend=backend), kind, accumulate=accumulate)
    expected, _, _ = train(reference, reference, kind, accumulate=accumulate)
    assert compiles == 1, counters["stats"]
    assert backend.compiles == 2  # training, and evaluation
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
    assert_same_parameters(model, reference)
    for name, value in model.state_dict().items():
        assert_close(value, reference.state_dict()[name])
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, parameter in model.named_parameters():
        sharded = parameter.dim() and parameter.shape[0] % 2 == 0
        assert isinstance(parameter, PlacedTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.placements == ((Shard(0),) if sharded else (Replicate(),)), name
        held = parameter.to_local().untyped_storage().nbytes()
        assert held == parameter.numel() * 4 // (2 if sharded else 1), name
        for key, value in optimizer.state[parameter].items():
            assert key == "step" or not parameter.dim() or value.placements == parameter.placements, (name, key)
    assert model.head.weight is model.embedding.weight
    assert not model.frozen.weight.requires_grad and model.frozen.weight.grad is None


def run_two_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))

    def choose(parameter):
        return (Shard(0), Shard(parameter.dim() - 1)) if parameter.dim() > 1 else (Replicate(), Shard(0))

    model, reference = mlp(), mlp()
    call = torch.compile(model, backend=Toy(aot=True, mesh=mesh, choose=choose))
    for forward, net in ((call, model), (reference, reference)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            forward(X).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    assert_same_parameters(model, reference)
    assert model[0].weight.to_local().shape == (4, 3)
    assert_close(model(X), reference(X))  # eager, from the parts of four ranks


def test_two_axes(launch):
    launch(run_two_axes, world_size=4)


class Broken(nn.Module):
    """The graph breaks, and what comes between stays eager, with plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        hidden, _ = self.middle(hidden[None])
        return self.last(hidden)


def run_broken(rank):
    for foreach in (None, True):
        broken(foreach)


def broken(foreach):
    torch._dynamo.reset()
    model, reference = Broken(), Broken()
    call = torch.compile(model, backend=Toy())
    norms = []
    for forward, net in ((call, model), (reference, reference)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            forward(X).pow(2).sum().backward()
            norms.append(full(nn.utils.clip_grad_norm_(net.parameters(), 0.5)).item())
            optimizer.step()
    torch.testing.assert_close(norms[:3], norms[3:])
    assert_same_parameters(model, reference)
    assert isinstance(model.first.weight, PlacedTensor) and not isinstance(model.middle.weight_ih_l0, PlacedTensor)


def run_scaled(rank):
    model, reference = mlp(), mlp()
    call = torch.compile(model, backend=Toy())
    scales = []
    for forward, net in ((call, model), (reference, reference)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(forward(X).pow(2).sum()).backward()
            if step == 1:
                net[2].weight.grad[0, 0] = float("inf")  # of rank 0's part
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0]
    assert_same_parameters(model, reference)


def test_a_script_trains_as_on_one_device(launch):
    scripts = [partial(run_script, kind=kind, aot=aot, accumulate=accumulate)
               for kind, aot, accumulate in (("adamw", True, 1), ("sgd", False, 2), ("derived", True, 1))]
    launch(in_turn, args=(*scripts, run_broken, run_scaled))
