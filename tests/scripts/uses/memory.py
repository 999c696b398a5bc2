"""Parameters and gradients in whose memory the script has other tensors: flat buffers, views, other parameters."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw, inputs, mlp, sgd, step, targets, tokens
from tests.scripts.use import use


def _flat(model, name):
    """A buffer of which the parameters' `.grad` or `.data` are views."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        view = flat[at:at + p.numel()].view_as(p)
        if name == "data":
            view.copy_(p.detach())
        setattr(p, name, view)
        at += p.numel()
    return flat


def _clipped_in_a_buffer(hp, make=sgd, before=True, hooks=False, model=None):
    model, seen = model or mlp(), []
    call, optimizer = hp.compile(model), make(model)
    if hooks:
        for p in model.parameters():
            p.register_hook(lambda g: g * 2)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()) if p.dim() > 1 else None)
    if not before:
        step(call, optimizer, inputs(), targets())
    flat = _flat(model, "grad")
    for _ in range(3):
        flat.zero_()
        for _ in range(2):
            F.mse_loss(call(inputs()), targets()).backward()
        seen.append(flat.norm().item())
        flat.clamp_(-0.01, 0.01)
        optimizer.step()
    return sorted(seen), flat, model, optimizer


@use
def gradients_in_a_flat_buffer(hp):
    return [_clipped_in_a_buffer(hp), _clipped_in_a_buffer(hp, adamw)]


@use
def gradients_in_a_flat_buffer_after_a_step(hp):
    return _clipped_in_a_buffer(hp, before=False)


@use
def gradients_in_a_flat_buffer_with_hooks(hp):
    return _clipped_in_a_buffer(hp, hooks=True)


@use
def gradients_in_a_flat_buffer_clipped_and_stepped_fused(hp):
    model = mlp()
    call, optimizer = hp.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)
    flat, norms = _flat(model, "grad"), []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(call(inputs()), targets()).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        norms.append(flat.norm())
        optimizer.step()
    return norms, flat, model, optimizer


@use
def gradients_that_the_script_holds(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    held = [torch.full_like(p, 0.01) for p in model.parameters()]
    for p, g in zip(model.parameters(), held):
        p.grad = g
    F.mse_loss(call(inputs()), targets()).backward()
    seen = [g.norm() for g in held]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    F.mse_loss(call(inputs()), targets()).backward()
    return seen, held, model


@use
def gradients_that_two_parameters_share(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        model[0].weight.grad = model[2].weight.grad = torch.zeros(16, 16)
        call(inputs()).square().mean().backward()
        optimizer.step()
    return model


@use
def parameters_in_a_flat_buffer(hp):
    model = mlp()
    flat = _flat(model, "data")
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for _ in range(3):
        losses.append(step(call, optimizer, inputs(), targets()))
        flat.mul_(0.9)
    return losses, flat, model


class Transposed(nn.Module):
    """Two parameters in the same memory, each with its own gradient and optimizer state."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Parameter(self.embedding.weight.detach().t())

    def forward(self, x):
        return self.middle(self.embedding(x)).tanh() @ self.head


@use
def parameters_in_the_memory_of_others(hp):
    model, losses = Transposed(), []
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(tokens()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, model


@use
def tied_by_their_data(hp):
    model, losses = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), []
    model[2].weight.data = model[0].weight.data
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(3):
        losses.append(step(call, optimizer, inputs(), targets()))
    return losses, model


@use
def weights_that_the_script_sees_by_other_tensors(hp):
    """All of them, so that they follow the placed parameters."""
    model = mlp()
    kept = {"state": model.state_dict(), "data": [p.data for p in model.parameters()], "first": (model[0].weight.detach(),)}
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        step(call, optimizer, inputs(), targets())
        seen.append([t.norm().item() for t in kept["data"]])
        kept["state"]["2.weight"].mul_(0.9)
    return seen, kept, model


@use
def rows_that_the_script_sees_by_other_tensors(hp):
    model = mlp()
    row, column = model[0].weight.detach()[3], model[2].weight.data.t()[1]
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        step(call, optimizer, inputs(), targets())
        seen.append([row.clone(), column.clone()])
        row.zero_()
    return seen, model


@use
def weights_that_arrays_of_numpy_share(hp):
    """A view, a parameter made of an array, a frozen weight's own array."""
    model, start = mlp(), torch.randn(32).numpy()
    model[0].bias = nn.Parameter(torch.from_numpy(start))
    arrays = {"weight": model[0].weight.detach().numpy()[2:4]}
    frozen = model[2].weight.requires_grad_(False).numpy()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for _ in range(3):
        step(call, optimizer, inputs(), targets())
        seen.append([float(each.sum()) for each in (*arrays.values(), start, frozen)])
        frozen *= 0.9
        arrays["weight"][:] = 0.1
    return seen, model


@use
def parameters_given_memory_that_others_let_go_of(hp):
    """vector_to_parameters: their `.data` are views of a vector that is then forgotten, or only read before they change."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    losses = [step(call, optimizer, inputs(), targets())]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())
    return losses + [step(call, optimizer, inputs(), targets()) for _ in range(2)], model


@use(refused={mesh: "memory was assigned to a parameter.* was written" for mesh in ("tp", "stages", "zero3")})
def parameters_given_a_flat_buffer_that_changes(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    losses = [step(call, optimizer, inputs(), targets())]
    flat = _flat(model, "data")
    losses.append(step(call, optimizer, inputs(), targets()))
    flat.mul_(0.9)
    return [*losses, step(call, optimizer, inputs(), targets())], flat, model
