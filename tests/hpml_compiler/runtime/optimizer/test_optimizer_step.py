"""Optimizer steps on sharded parameters: hooks, errors, earlier state, clipping. Every optimizer: test_every_optimizer."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, place
from tests.helpers.frozen import in_turn
from tests.hpml_compiler.runtime.common import X, assert_close, assert_same_parameters, mlp
from tests.hpml_compiler.runtime.toy import Toy


def step(call, optimizer):
    optimizer.zero_grad()
    call(X).pow(2).sum().backward()
    optimizer.step()


def check_state(optimizer, model):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    for parameter, state in optimizer.state.items():
        assert isinstance(parameter, PlacedTensor) and parameter._local_tensor.grad is None
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert value.placements == (Shard(0),) and value.to_local().shape[0] == parameter.shape[0] // 2


def run_muon(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    start, gradient = torch.randn(8, 6), torch.randn(8, 6)
    ends = []
    for value, grad in ((place(start.clone(), mesh, [Shard(0)]), place(gradient, mesh, [Shard(0)])),
                        (start.clone(), gradient)):
        parameter = value.requires_grad_()
        parameter.grad = grad
        optimizer = torch.optim.Muon([parameter], lr=0.01)
        for _ in range(3):
            optimizer.step()
        ends.append(parameter)
    assert ends[0].placements == (Shard(0),)
    assert_close(*ends, atol=1e-3)  # it moved by up to 0.04, and multiplies in bfloat16
    assert (ends[1] - start).abs().max() > 0.02


def run_hooks(rank):
    model = mlp()
    call = torch.compile(model, backend=Toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(call, optimizer)
    seen = []
    handle = optimizer.register_step_pre_hook(lambda opt, *_: seen.extend(map(type, opt.param_groups[0]["params"])))
    step(call, optimizer)
    assert seen == [PlacedTensor] * 4
    handle.remove()

    before = [(p.to_local().clone(), dict(optimizer.state[p])) for p in model.parameters()]
    optimizer.param_groups[0]["betas"] = None  # raises in the middle of a step
    with pytest.raises(TypeError):
        step(call, optimizer)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    for parameter, (value, state) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value) and isinstance(parameter, PlacedTensor)
        assert all(isinstance(state[key], DTensor) for key in ("exp_avg", "exp_avg_sq"))
    step(call, optimizer)
    check_state(optimizer, model)


def run_before(rank):
    """State from steps before the model is compiled is placed, and moves to the new parameter."""
    model, reference = mlp(), mlp()
    optimizer, expected = (torch.optim.AdamW(net.parameters(), lr=0.1) for net in (model, reference))
    step(model, optimizer)
    call = torch.compile(model, backend=Toy())
    for _ in range(2):
        step(call, optimizer)
    for _ in range(3):
        step(reference, expected)
    assert_same_parameters(model, reference)
    check_state(optimizer, model)
    assert len(optimizer.state) == 4


def run_clip(rank):
    model, reference = mlp(), mlp()
    call = torch.compile(model, backend=Toy())
    for forward in (call, reference):
        forward(X).pow(2).sum().backward()
    for order in (2.0, 1.0, 3.0, float("inf")):
        assert_close(nn.utils.get_total_norm([p.grad for p in model.parameters()], order),
                     nn.utils.get_total_norm([p.grad for p in reference.parameters()], order))
    for net in (model, reference):
        nn.utils.clip_grad_value_(net.parameters(), 0.3)
    norm, expected = (nn.utils.clip_grad_norm_(list(net.parameters()), 0.1) for net in (model, reference))
    assert f"{norm:.4f}" == f"{expected:.4f}" and norm.item() == pytest.approx(expected.item())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad.placements == ours.placements
        assert_close(ours.grad, theirs.grad)


def test_steps(launch):
    launch(in_turn, args=(run_muon, run_hooks, run_before, run_clip))
