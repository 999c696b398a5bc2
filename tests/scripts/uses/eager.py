"""Scripts that use parameters and gradients outside of the compiled model."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import classes, inputs, mlp, sgd, step, targets
from tests.scripts.use import use


def _with_gradients(hp, steps=1):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(steps - 1):
        step(call, optimizer, inputs(), targets())
    optimizer.zero_grad()
    loss = F.mse_loss(call(inputs()), targets())
    loss.backward()
    return model, call, optimizer


@use
def norms_into_plain_tensors(hp):
    """What is changed in place is changed once."""
    model, _, _ = _with_gradients(hp)
    r, n, m = torch.zeros(()), torch.zeros(()), torch.zeros(16)
    r += model[0].weight.abs().sum()
    for p in model.parameters():
        n.add_(p.grad.norm())
        n += p.detach().norm() ** 2
    m.add_(model[0].weight.detach().mean(0), alpha=2)
    m.copy_(m * model[2].bias.detach())
    m[3] = model[0].bias.detach().max()
    m[4:8] += model[0].weight.grad[0, 4:8]
    torch.add(m, model[2].bias.detach(), out=m)
    return r, n, m, model


@use
def penalties_on_parameters(hp):
    model, call, optimizer = _with_gradients(hp)
    optimizer.zero_grad()
    loss = F.mse_loss(call(inputs()), targets())
    loss = loss + 0.01 * sum(p.norm() for p in model.parameters() if p.dim() > 1)
    w = model[2].weight
    loss = loss + 0.01 * (w @ w.t() - torch.eye(16)).square().sum() + 0.1 * model[0].weight.norm(dim=1).max() \
        + 0.01 * torch.logsumexp(w.flatten(), 0) + 0.01 * F.cosine_similarity(w[0], w[1], dim=0)
    loss.backward()
    optimizer.step()
    return loss, model


@use
def weights_used_by_hand(hp):
    """A parameter in a plain operation of the loss."""
    model, call, optimizer = _with_gradients(hp)
    optimizer.zero_grad()
    h = F.linear(inputs(), model[0].weight, model[0].bias).tanh()
    loss = h.mean() + F.mse_loss(call(inputs()), targets()) + (h @ model[2].weight.t()).square().mean()
    loss.backward()
    optimizer.step()
    return loss, model


@use
def gradient_surgery(hp):
    """PCGrad: two tasks, each gradient without what goes against the other."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        grads = []
        for loss in (F.mse_loss, lambda out, _: F.cross_entropy(out, classes())):
            optimizer.zero_grad()
            loss(call(inputs()), targets()).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        one, two = (torch.cat([g.flatten() for g in each]) for each in grads)
        dot = one @ two
        if dot < 0:
            one, two = one - dot / two.square().sum() * two, two - dot / one.square().sum() * one
        whole, at = one + two, 0
        for p in model.parameters():
            p.grad = whole[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
    return dot, model, optimizer


@use
def balances_gradients_of_tasks(hp):
    """GradNorm: norms of each task's gradient on one shared layer set the weights."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        out = call(inputs())
        losses = [F.mse_loss(out, targets()), F.cross_entropy(out, classes())]
        norms = torch.stack([torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0].norm() for loss in losses])
        weights = (norms.mean() / norms).detach()
        optimizer.zero_grad()
        sum(w * loss for w, loss in zip(weights, losses)).backward()
        optimizer.step()
    return weights, model


@use
def top_gradients_only(hp):
    """The largest entries of each gradient; the rest is kept for the next step."""
    model, call, optimizer = _with_gradients(hp)
    kept = {}
    for _ in range(2):
        for name, p in model.named_parameters():
            whole = p.grad + kept.get(name, 0)
            limit = whole.abs().flatten().topk(max(1, p.numel() // 4)).values[-1]
            mask = whole.abs() >= limit
            kept[name], p.grad = whole * ~mask, whole * mask
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
    return kept, model


@use
def evolution_without_gradients(hp):
    model = mlp()
    call = hp.compile(model)
    with torch.no_grad():
        for _ in range(2):
            noise = [torch.randn_like(p) for p in model.parameters()]
            scores = []
            for sign in (1, -1):
                for p, e in zip(model.parameters(), noise):
                    p.add_(e, alpha=0.1 * sign)
                scores.append(F.mse_loss(call(inputs()), targets()))
                for p, e in zip(model.parameters(), noise):
                    p.sub_(e, alpha=0.1 * sign)
            for p, e in zip(model.parameters(), noise):
                p.sub_(e * (scores[0] - scores[1]), alpha=0.5)
    return scores, model


@use
def evolution_after_training(hp):
    """Noise in the shape of placed parameters, from the one generator."""
    model, call, _ = _with_gradients(hp)
    with torch.no_grad():
        noise = [torch.randn_like(p) for p in model.parameters()]
        for p, e in zip(model.parameters(), noise):
            p += e * 0.1
            p.add_(torch.rand(p.shape))
        nn.init.normal_(model[0].bias)
        model[2].bias.uniform_(-1, 1)
    return call(inputs()), noise, torch.rand(2), model


@use
def projects_weights(hp):
    """Constraints after each step: norms of rows, non-negative, upper triangular."""
    model, call, optimizer = _with_gradients(hp)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True).clamp(min=1))
            model[2].weight.clamp_(min=0)
            model[4].weight.copy_(model[4].weight.triu())
            model[2].weight[0] = 0
            model[0].weight[:, 1].mul_(2)
            model[0].bias.data[3] = 1.0
        step(call, optimizer, inputs(), targets())
    return model


@use
def line_search(hp):
    model, call, _ = _with_gradients(hp)
    seen = []
    with torch.no_grad():
        start = [p.clone() for p in model.parameters()]
        slope = sum((p.grad * p.grad).sum() for p in model.parameters())
        before = F.mse_loss(call(inputs()), targets())
        for rate in (100.0, 1.0, 0.1):
            for p, s in zip(model.parameters(), start):
                p.copy_(s - rate * p.grad)
            after = F.mse_loss(call(inputs()), targets())
            seen.append(after)
            if after <= before - 1e-4 * rate * slope:
                break
    return seen, model


@use
def conjugate_gradients(hp):
    """Dot products of gradients kept as lists."""
    model, call, _ = _with_gradients(hp)
    old = direction = None
    for _ in range(3):
        model.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
        new = [-p.grad.clone() for p in model.parameters()]
        if direction is None:
            direction = new
        else:
            beta = sum((a * a).sum() for a in new) / sum((a * a).sum() for a in old)
            direction = [a + beta * d for a, d in zip(new, direction)]
        old = new
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), direction, alpha=0.1)
    return beta, direction, model


@use
def fisher_information(hp):
    model = mlp()
    call = hp.compile(model)
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    for x, label in zip(inputs().split(2), classes().split(2)):
        model.zero_grad()
        F.cross_entropy(call(x), label).backward()
        for f, p in zip(fisher, model.parameters()):
            f += p.grad.detach() ** 2 / 4
    return fisher, model
