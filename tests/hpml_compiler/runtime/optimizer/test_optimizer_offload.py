"""Optimizer state that lies in files between steps: steps, state dicts and losses are those of torch's own."""
from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.monitor.profiled_step import StepProfile
from hpml_compiler.runtime.optimizer import optimizer_offload
from hpml_compiler.runtime.optimizer.optimizer_step import ELEMENTWISE
from hpml_compiler.runtime.optimizer.resident_memory import local
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.transforms.memory.offload_storage import is_offload_storage
from tests.helpers.peaks import least_peak, state_tensors
from tests.helpers.plans import plan_of_ranks

KINDS = sorted(ELEMENTWISE, key=lambda kind: kind.__name__)


def model_of(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4 * width), nn.Linear(4 * width, 1))


def offloaded(model: nn.Module, folder="") -> nn.Module:
    optimizer_offload.offload_state(model.parameters(), str(folder))
    optimizer_offload.watch_steps()
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    x = torch.linspace(-1, 1, 8 * 64).view(8, 64).sin()
    for _ in range(count):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def equal(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_elementwise_optimizer_steps_as_ever(kind, tmp_path):
    plain, ours = model_of(), offloaded(model_of(), tmp_path)
    arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    groups = [{"params": list(ours.parameters())[:2], "lr": 2e-3}, {"params": list(ours.parameters())[2:]}]
    theirs = [{"params": list(plain.parameters())[:2], "lr": 2e-3}, {"params": list(plain.parameters())[2:]}]
    expected, optimizer = kind(theirs, lr=1e-3, **arguments), kind(groups, lr=1e-3, **arguments)
    steps(plain, expected)
    steps(ours, optimizer)
    assert equal(ours.parameters(), plain.parameters()) and equal(state_of(optimizer), state_of(expected))
    assert all(is_offload_storage(value) for value in state_of(optimizer) if value.numel() >= 1024)
    assert all(equal([p.grad], [q.grad]) for p, q in zip(ours.parameters(), plain.parameters())), "gradients are there again"
    assert not list(tmp_path.iterdir())


def test_state_dicts_are_what_they_were():
    plain, ours = model_of(), offloaded(model_of())
    expected, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(ours.parameters())
    for each, its in (expected, plain), (optimizer, ours):
        steps(its, each)
        each.load_state_dict(copy.deepcopy(each.state_dict()))
        steps(its, each)
    assert equal(ours.parameters(), plain.parameters())
    saved, theirs = optimizer.state_dict(), expected.state_dict()
    assert saved["param_groups"] == theirs["param_groups"] and saved["state"].keys() == theirs["state"].keys()
    assert all(equal(saved["state"][k].values(), theirs["state"][k].values()) for k in saved["state"])
    assert all(is_offload_storage(value) for value in state_of(optimizer)
               if value.numel() >= 1024), "those of a state dict, too"


def test_a_parameter_without_a_gradient_is_left_alone():
    model = offloaded(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].requires_grad_(False)
    steps(model, optimizer, 1)
    assert len(optimizer.state) == 4 and model[0].weight not in optimizer.state


def test_an_error_in_a_step_leaves_groups_and_gradients_as_they_were(monkeypatch):
    model = offloaded(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, 1)
    groups = list(optimizer.param_groups[0]["params"])
    monkeypatch.setattr(optimizer_offload, "_return", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], groups, strict=True))
    assert all(p.grad is not None for p in groups)


def hooked(parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(("make", "closure", "why"), [
    (torch.optim.LBFGS, True, "may combine all parameters"),
    (torch.optim.SGD, True, "a step with a closure runs the model"),
    (hooked, False, "step hooks"),
    (lambda parameters: torch.optim.Adam(parameters, differentiable=True), False, "differentiable or capturable"),
], ids=["LBFGS", "closure", "hooks", "differentiable"])
def test_what_cannot_be_stepped_in_parts_is_refused_with_a_reason(make, closure, why):
    model = offloaded(model_of())
    optimizer = make(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(BadInput, match=why):
        optimizer.step(*[lambda: model(torch.ones(1, 64)).sum()] if closure else [])


def test_state_that_must_be_moved_to_be_stepped_goes_back_to_where_it_was(monkeypatch):
    """As on a GPU, whose code cannot read the memory of the host."""
    monkeypatch.setattr(optimizer_offload, "_moves", lambda parameter: True)
    plain, ours = model_of(), offloaded(model_of())
    expected, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(ours.parameters())
    steps(plain, expected)
    steps(ours, optimizer, 1)
    before = [value for value in state_of(optimizer) if value.numel() >= 1024]
    steps(ours, optimizer, 2)
    assert equal(ours.parameters(), plain.parameters()) and equal(state_of(optimizer), state_of(expected))
    after = [value for value in state_of(optimizer) if value.numel() >= 1024]
    assert all(a is b and is_offload_storage(a) for a, b in zip(after, before, strict=True))


def test_others_are_left_alone():
    model = model_of()
    offloaded(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, 1)
    assert not any(map(is_offload_storage, state_of(optimizer)))


def test_state_that_alone_exceeds_the_budget_trains_to_the_same_losses():
    """What is allocated never comes near the state's bytes, the first step that makes it included."""
    def trained(options):
        hpml_compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
        call = torch.compile(model, backend="hpml", options={"compiler": "eager", "optimizer": "adam", **options})
        x, losses, before = torch.linspace(-1, 1, 4 * 128).view(4, 128), [], sum(p.nbytes for p in model.parameters())
        profile = StepProfile("cpu")
        for _ in range(3):
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        state = sum(value.nbytes for value in state_of(optimizer))
        return losses, profile.stop(before).peak_bytes, state

    expected, unbounded, state = trained({})
    budget = state - 100_000
    losses, peak, _ = trained({"memory_budget": budget, "offload": "optimizer"})
    assert equal(losses, expected) and peak <= budget < state < unbounded


def two_ranks(rank: int, options: dict) -> tuple[list[torch.Tensor], list[bool], dict]:
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "mesh": {"tp": 2}, **options})
    x, losses = torch.linspace(-1, 1, 8 * 64).view(8, 64).sin(), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    state_here = state_tensors(optimizer)
    state = hpml_compiler.full_state_dict(model, optimizer)
    hpml_compiler.reset()
    return losses, [is_offload_storage(value) for value in state_here if value.numel() >= 1024], state


def test_parts_of_two_ranks_are_offloaded_too(launch):
    plain, ours = launch(two_ranks, args=({},)), launch(two_ranks, args=({"offload": "optimizer"},))
    for (expected, inside, state), (losses, elsewhere, same) in zip(plain, ours, strict=True):
        assert equal(losses, expected) and elsewhere and all(elsewhere) and not any(inside)
        assert same.keys() == state.keys() and str(same) == str(state)


STAGES = {"compiler": "eager", "mesh": {"pp": 2}, "microbatches": 4, "optimizer": "adam", "outputs": "whole"}
"""With the loss outside in all runs; by default it becomes part of the step, but not under a budget or by a plan."""


def in_stages(rank: int, options: dict[str, Any], folder: str) -> None:
    """Without offloading, with it, as in a next launch, by the plan of the run, and below a budget."""
    os.environ |= {"HPML_CACHE": "1", "HPML_CACHE_DIR": folder}
    away = {"offload": "optimizer", "offload_folder": folder}
    expected, highest, state = stages_trained(options)
    for _ in range(2):
        found, peak, _ = stages_trained({**options, **away})
        assert equal(found, expected) and peak < state < highest
    plan = plan_of_ranks()
    assert plan.graphs[0].memory.optimizer == 0
    by_plan = {"compiler": "eager", "optimizer": "adam", "plan": plan, **away}
    for each in by_plan, {**options, "offload": "all", "memory_budget": state}:
        assert equal(stages_trained(each)[0], expected)
    if rank == 0:
        planned = hpml_compiler.plan(stages_model(), (stages_batch(),), Cluster.local(2, "cpu"), **options, offload="optimizer")
        assert (planned.graphs[0].pipeline, planned.graphs[0].memory) == (plan.graphs[0].pipeline, plan.graphs[0].memory)


def stages_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(18)))


def stages_batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * 128).view(8, 128).sin()


def stages_trained(options: dict[str, Any]) -> tuple[list[torch.Tensor], int, int]:
    """Losses of steps, an evaluation, and this rank's parameters; the peak of further steps; bytes of this rank's state."""
    hpml_compiler.reset()
    model, x, losses = stages_model(), stages_batch(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    call = torch.compile(model, backend="hpml", options=options)

    def step() -> None:
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())

    step()
    with torch.no_grad():
        losses.append(call(x[:4]).clone())
    peak = least_peak(step, model, optimizer)
    state = [x for x in state_tensors(optimizer) if x.numel() >= 1024]
    if "offload" in options:
        assert state and all(map(is_offload_storage, state))
    return [*losses, *(local(p).detach().clone() for p in model.parameters())], peak, sum(x.nbytes for x in state)


@pytest.mark.parametrize("schedule", [{}, {"schedule": "zero_bubble", "zero": 3}], ids=["1f1b", "zero_bubble"])
def test_state_of_pipeline_stages_is_offloaded(launch, tmp_path, schedule):
    launch(in_stages, args=({**STAGES, **schedule}, str(tmp_path)))
