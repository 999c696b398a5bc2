"""Scripts between backward and the next step: gradients, optimizers' groups and state, schedules, averages."""
from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw, inputs, mlp, sgd, step, targets
from tests.scripts.use import use


def backward(call, optimizer, rows=slice(None)):
    optimizer.zero_grad()
    loss = F.mse_loss(call(inputs()[rows]), targets()[rows])
    loss.backward()
    return loss.item()


@use
def goes_on_from_one_device(hp):
    """Model, optimizer and schedule of a file written without hpml; once before the first step, once later."""
    plain = mlp()
    first = adamw(plain)
    schedule = torch.optim.lr_scheduler.StepLR(first, 2, gamma=0.5)
    for _ in range(3):
        step(plain, first, inputs(), targets())
        schedule.step()
    saved = {"model": plain.state_dict(), "optimizer": first.state_dict(), "schedule": schedule.state_dict()}
    model = mlp()
    call, optimizer, losses = hp.compile(model), adamw(model, lr=1.0), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for _ in range(2):
        for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            part.load_state_dict(copy.deepcopy(saved[name]))
        for _ in range(2):
            losses.append(step(call, optimizer, inputs(), targets()))
            schedule.step()
    return losses, model, optimizer, schedule.get_last_lr()


@use
def norms_taken_for_numbers(hp):
    """Where torch takes a tensor for a number, it asks no subclass."""
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for _ in range(2):
        seen.append(backward(call, optimizer))
        norms = [p.grad.norm() for p in model.parameters()]
        largest = torch.tensor(norms).max()
        mean = sum(norms) / len(norms)
        seen += [largest, torch.full((2,), mean), torch.linspace(0, norms[0], 3)]
        seen.append(torch.add(torch.ones(2), torch.ones(2), alpha=mean))
        torch._foreach_div_([p.grad for p in model.parameters()], [max(1.0, n.item()) for n in norms])
        optimizer.step()
        seen.append([F.leaky_relu(-torch.ones(2), negative_slope=norms[1]), torch.tensor([norms[2], mean])])
    return seen, model, optimizer


@use
def accumulates_in_buffers_of_its_own(hp):
    """Plain tensors to which placed gradients are added, and which become gradients in the end."""
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    for _ in range(2):
        kept = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
        for rows in (slice(0, 4), slice(4, 8)):
            backward(call, optimizer, rows)
            torch._foreach_add_(kept, [p.grad for p in model.parameters()], alpha=0.5)
        torch._foreach_mul_(kept, [0.9 ** k for k in range(len(kept))])
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return kept, model, optimizer


@use
def parameters_change_their_group(hp):
    model = mlp()
    call, losses = hp.compile(model), []
    optimizer = torch.optim.AdamW([{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.1}],
                                  lr=0.01, eps=1e-4)
    losses.append(step(call, optimizer, inputs(), targets()))
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].append(moved)
    losses.append(step(call, optimizer, inputs(), targets()))
    del optimizer.state[model[0].weight]  # its moments begin anew
    optimizer.state[model[2].weight]["exp_avg"].zero_()
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.05, "weight_decay": 0.3})
    losses.append(step(call, optimizer, inputs(), targets()))
    optimizer.state.clear()
    losses.append(step(call, optimizer, inputs(), targets()))
    return losses, model, optimizer


@use(refused={"stages": "create_graph=True.* of a pipeline stage"})
def backward_that_keeps_a_graph(hp):
    """Of which nobody asks for second derivatives; gradients are added up, and what is added is a new tensor each time."""
    model, seen = mlp(), []
    call, optimizer = hp.compile(model), adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        for rows in (slice(0, 4), slice(4, 8)):
            before = model[0].weight.grad
            loss = F.mse_loss(call(inputs()[rows]), targets()[rows])
            loss.backward(create_graph=True)
            seen += [loss.item(), model[0].weight.grad is before, model[0].weight.grad.requires_grad]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return seen, model, optimizer


@use
def scaler_of_two_optimizers_with_an_overflow(hp):
    model = mlp()
    call, losses = hp.compile(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    both = [sgd(model[:2]), adamw(model[2:])]
    for number in range(4):
        for optimizer in both:
            optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets())
        scaler.scale(loss).backward()
        if number == 1:
            model[4].weight.grad[1, 3] = float("inf")  # the first optimizer steps, the second does not
        for optimizer in both:
            scaler.unscale_(optimizer)
        if number != 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in both:
            scaler.step(optimizer)
        scaler.update()
        losses += [loss.item(), scaler.get_scale()]
    return losses, model, both, scaler.state_dict()


@use
def state_put_away_in_numpy(hp):
    """Moments that are moved out of the way for an evaluation, and back."""
    model = mlp()
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        seen.append(step(call, optimizer, inputs(), targets()))
        away = {p: {k: v.numpy().copy() for k, v in state.items()} for p, state in optimizer.state.items()}
        for state in optimizer.state.values():
            state.clear()
        with torch.no_grad():
            seen.append(call(inputs()))
        for p, state in optimizer.state.items():
            state.update({k: torch.from_numpy(v) for k, v in away[p].items()})
    seen.append(step(call, optimizer, inputs(), targets()))
    return seen, model, optimizer
