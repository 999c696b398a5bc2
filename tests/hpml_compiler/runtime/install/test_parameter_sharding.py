"""Sharded parameters: later changes by the script to them and to their model."""
from __future__ import annotations

import copy
import io
import weakref
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from passes.errors import BadInput
from tests.helpers.frozen import in_turn
from tests.hpml_compiler.runtime.common import X, assert_close, assert_same_parameters, full, mlp
from tests.hpml_compiler.runtime.toy import Toy


def step(call, optimizer):
    optimizer.zero_grad()
    call(X).pow(2).sum().backward()
    optimizer.step()


def run_memory(rank):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    old = [weakref.ref(p) for p in model.parameters()]
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    torch.compile(model, backend=Toy(aot=True))(X).sum().backward()
    assert all(ref() is None for ref in old + storages)
    assert [p.to_local().untyped_storage().nbytes() for p in model.parameters()] == [96, 16, 64, 8]
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def run_freeze(rank):
    model, reference = mlp(), mlp()
    backend = Toy()
    call = torch.compile(model, backend=backend)
    call(X).sum().backward()
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    call(X).sum().backward()
    assert backend.compiles == 2 and model[0].weight.grad is None and model[2].weight.grad is not None
    model[0].weight.requires_grad_(True)
    model.zero_grad()
    call(X).sum().backward()
    reference(X).sum().backward()
    assert_close(model[0].weight.grad, reference[0].weight.grad)
    model[0].weight = nn.Parameter(torch.ones(8, 6))
    call(X).sum().backward()
    assert isinstance(model[0].weight, PlacedTensor) and backend.compiles == 3
    del model[0].bias
    model[0].register_parameter("bias", None)
    assert_close(call(X), model(X))


def run_checkpoint(rank, folder):
    model, reference = mlp(), mlp()
    optimizer, expected = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(reference.parameters())
    call = torch.compile(model, backend=Toy())
    for _ in range(2):
        step(call, optimizer)
        step(reference, expected)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)  # whole plain tensors, as one device would have saved
    assert {type(v) for v in saved["model"].values()} == {torch.Tensor}
    plain = mlp()
    plain.load_state_dict(saved["model"])
    assert_same_parameters(plain, reference)

    def resumed(before):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        call = torch.compile(model, backend=Toy())
        if not before:
            step(call, optimizer)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        return model, optimizer, call

    runs = [resumed(before=True), resumed(before=False)]
    for _ in range(2):
        step(reference, expected)
        for _, optimizer, call in runs:
            step(call, optimizer)
    for model, optimizer, _ in runs:
        assert_same_parameters(model, reference)
        assert optimizer.state[model[0].weight]["exp_avg"].placements == (Shard(0),)
        assert optimizer.state[model[0].weight]["exp_avg"].to_local().shape == (4, 6)

    other = runs[0][0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())  # DTensors
    assert_same_parameters(other, reference)
    mesh = model[0].weight.device_mesh
    other.load_state_dict({k: distribute_tensor(full(v), mesh, [Shard(v.dim() - 1)])
                           for k, v in plain.state_dict().items()})  # DTensors with another placement
    assert_same_parameters(other, plain)

    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    fresh = mlp()
    torch.compile(fresh, backend=Toy())(X)
    state = {"model": {k: torch.zeros_like(v) for k, v in fresh.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state["model"])
    assert_same_parameters(fresh, reference)


def run_averages(rank):
    results = []
    for compiled in (True, False):
        model = mlp()
        average, by_hand = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), copy.deepcopy(model)
        call = torch.compile(model, backend=Toy()) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(call, optimizer)
            average.update_parameters(model)
            with torch.no_grad():
                for kept, now in zip(by_hand.parameters(), model.parameters(), strict=True):
                    kept.mul_(0.9).add_(now, alpha=0.1)
                    kept.lerp_(now.data, 0.1)
                for kept, now in zip(by_hand.state_dict().values(), model.state_dict().values(), strict=True):
                    kept.copy_(0.9 * kept + 0.1 * now)
        copied = copy.deepcopy(model)
        assert isinstance(copied[0].weight, nn.Parameter) and copied[0].weight is not model[0].weight
        if compiled:
            assert copied[0].weight.placements == (Shard(0),)
        assert_close(copied(X), model(X))
        results.append((model, average, by_hand))
    for ours, theirs in zip(*results, strict=True):
        assert_same_parameters(ours, theirs)
    assert not any(isinstance(p, DTensor) for p in results[0][2].parameters())


def run_casts(rank):
    model, reference = mlp(), mlp()
    backend = Toy()
    call = torch.compile(model, backend=backend)
    call(X).sum().backward()
    model.to("cpu").cpu().float()
    call(X)
    assert backend.compiles == 1
    model.double()
    assert model[0].weight.dtype == model[0].weight.to_local().dtype == torch.float64
    call(X.double()).sum().backward()
    assert backend.compiles == 2 and model[0].weight.grad.dtype == torch.float64
    assert_close(model(X.double()), reference.double()(X.double()))


def run_gradients_before(rank):
    """Gradients and hooks from before the first call of the compiled model stay."""
    model, reference = mlp(), mlp()
    log = []
    handles = [net[0].weight.register_hook(lambda grad: grad * 2) for net in (model, reference)]
    model[2].weight.register_post_accumulate_grad_hook(lambda p: log.append(type(p.grad)))
    model[0].weight.custom = "kept"
    call = torch.compile(model, backend=Toy())
    for forward in (model, reference, call, reference):
        forward(X).sum().backward()
    assert log == [torch.Tensor, PlacedTensor] and model[0].weight.custom == "kept"
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    for handle in handles:
        handle.remove()
    for forward in (call, reference):
        forward(X).sum().backward()
    assert_close(model[0].weight.grad, reference[0].weight.grad)


def run_autograd(rank):
    model, reference = mlp(), mlp()
    call = torch.compile(model, backend=Toy(aot=True))
    ours = torch.autograd.grad(call(X).sum(), list(model.parameters()))
    theirs = torch.autograd.grad(reference(X).sum(), list(reference.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a, DTensor)
        assert_close(a, b)
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):
        call(X).sum().backward(inputs=[model[2].weight])
        reference(X).sum().backward(inputs=[reference[2].weight])
    assert [p.grad is None for p in model.parameters()] == [True, True, False, True]
    assert_close(model[2].weight.grad, reference[2].weight.grad)
    penalty = sum(p.pow(2).sum() for p in model.parameters())  # eager, on DTensors
    (call(X).sum() + penalty).backward()
    (reference(X).sum() + sum(p.pow(2).sum() for p in reference.parameters())).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(a.grad, b.grad)


class Twice(nn.Module):
    """Both parameters get the same gradient, which AOTAutograd returns as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.a + self.b) * x


def run_shared_gradient(rank):
    model = Twice()
    call = torch.compile(model, backend=Toy(aot=True))
    given = torch.ones(4)
    call(torch.ones(4)).backward(given)
    model.a.grad.mul_(2)
    assert full(model.a.grad).tolist() == [2, 2, 2, 2]
    assert full(model.b.grad).tolist() == given.tolist() == [1, 1, 1, 1]


def run_bad(rank):
    class Bare(Toy):
        def __call__(self, gm, example_inputs):
            self.choose = lambda parameter: (Shard(1),)
            return super().__call__(gm, example_inputs)

    model = nn.Linear(5, 4, bias=False)
    with pytest.raises(Exception, match="2 parts do not divide dim 1 of size 5") as error:
        torch.compile(model, backend=Bare())(torch.ones(2, 5))
    assert isinstance(error.value.__cause__ or error.value.inner_exception, BadInput)
    assert type(model.weight) is nn.Parameter

    theirs = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    theirs.weight = nn.Parameter(distribute_tensor(theirs.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(Exception, match="does not support DTensors.*\n.*graph input weight, used by mul"):
        torch.compile(lambda: theirs.weight * 2, backend=Toy())()


def test_later_changes(launch, tmp_path):
    checkpoint = partial(run_checkpoint, folder=str(tmp_path / "dcp"))
    launch(in_turn, args=(run_memory, run_freeze, checkpoint, run_averages, run_gradients_before, run_autograd,
                          run_shared_gradient, run_bad))


def test_moving_and_casting_the_model(launch):
    launch(run_casts)
