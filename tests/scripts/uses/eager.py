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
def running_statistics(hp):
    model, call, optimizer = _with_gradients(hp)
    mean, square = {}, {}
    for _ in range(2):
        step(call, optimizer, inputs(), targets())
        for name, p in model.named_parameters():
            mean.setdefault(name, torch.zeros(p.shape)).mul_(0.9).add_(p.grad, alpha=0.1)
            square.setdefault(name, torch.zeros(p.shape)).addcmul_(p.grad, p.grad, value=0.5)
            mean[name].lerp_(p.detach(), 0.01)
    return mean, square, model


@use
def logged_numbers(hp):
    model, _, _ = _with_gradients(hp)
    rows = []
    for name, p in model.named_parameters():
        rows.append((name, p.mean().item(), p.std().item(), p.grad.abs().max().item(), float(p.grad.norm(1)), tuple(p.shape),
                     p.numel(), p.grad.isnan().any().item(), (p.grad == 0).sum().item(), f"{p.detach().sum():.6f}"))
    return rows, sum(p.numel() for p in model.parameters()), sum(p.norm() ** 2 for p in model.parameters()).sqrt()


@use
def histograms_and_quantiles(hp):
    model, _, _ = _with_gradients(hp)
    w = model[0].weight.detach()
    return (torch.histc(w, 5), torch.quantile(w.flatten(), 0.3), w.kthvalue(3).values, w.sort(0).values, w.topk(2).values,
            torch.bincount((w.flatten() > 0).long()), w.argmax(), w.median(), w.unique().numel(), torch.linalg.matrix_rank(w))


@use
def singular_values(hp):
    model, _, _ = _with_gradients(hp)
    w, grad = model[2].weight.detach(), model[0].weight.grad
    return torch.linalg.svdvals(w), torch.linalg.norm(grad, 2), w @ w.t(), torch.linalg.cond(w), grad.t() @ model[0].bias.grad


@use
def pieces_and_joins(hp):
    model, _, _ = _with_gradients(hp)
    w, b = model[0].weight, model[0].bias
    return (torch.cat([w, b[:, None]], 1), torch.stack([b, b]), w[3], w[:, 2:5], w[w > 0.1], w.t().contiguous(),
            w.view(-1)[::7], torch.cat([p.grad.flatten() for p in model.parameters()]), [row.sum() for row in w],
            w.split(8)[1], w.roll(1, 0),
            torch.where(w > 0, w, 0), F.pad(w, (1, 1)), w.reshape(2, -1), w.diagonal(), w.flip(1), torch.outer(b, b).sum())


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
def a_penalty_alone(hp):
    model, _, optimizer = _with_gradients(hp)
    optimizer.zero_grad()
    sum((p ** 2).sum() + p.abs().mean() for p in model.parameters()).backward()
    return model


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
def gradients_with_noise(hp):
    model, call, optimizer = _with_gradients(hp)
    for p in model.parameters():
        p.grad += torch.randn(p.shape) * 0.01
        p.grad.add_(torch.randn_like(p) * 0.01)
    optimizer.step()
    return step(call, optimizer, inputs(), targets()), model


@use
def gradients_centralized_and_signed(hp):
    model, call, optimizer = _with_gradients(hp)
    for p in model.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
            p.grad.data.div_(p.grad.std() + 1e-3)
        else:
            p.grad = p.grad.mul(1e3).tanh()
    optimizer.step()
    return step(call, optimizer, inputs(), targets()), model


@use
def gradients_scaled_by_layer(hp):
    model, call, optimizer = _with_gradients(hp)
    for i, p in enumerate(model.parameters()):
        p.grad.mul_(0.5 ** i)
        p.grad[p.grad.abs() < 1e-4] = 0
        p.grad.nan_to_num_(0.0)
    torch._foreach_mul_([p.grad for p in model.parameters()], 2.0)
    optimizer.step()
    return step(call, optimizer, inputs(), targets()), model


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
def gradients_made_by_the_script(hp):
    model, _, optimizer = _with_gradients(hp)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.5)
    optimizer.step()
    return model, optimizer


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
def copies_rows_between_parameters(hp):
    model, call, optimizer = _with_gradients(hp)
    with torch.no_grad():
        model[2].weight[:, :16].copy_(model[0].weight[:16])
        model[0].weight[1:3] = model[0].weight[5:7]
        model[4].weight.copy_(model[2].weight[:4, :16])
        model[0].weight.index_fill_(0, torch.tensor([4]), 0.5)
        model[0].weight.t()[0].add_(1)
        model[2].bias.view(4, 4)[1].zero_()
    return step(call, optimizer, inputs(), targets()), model


@use
def averages_of_parameters(hp):
    model, call, optimizer = _with_gradients(hp)
    average = [torch.zeros_like(p) for p in model.parameters()]
    for count in range(1, 4):
        step(call, optimizer, inputs(), targets())
        for a, p in zip(average, model.parameters()):
            a += (p.detach() - a) / count
    torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
    return average, model


@use
def distance_from_the_start(hp):
    model = mlp()
    start = [p.detach().clone() for p in model.parameters()]
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for _ in range(2):
        step(call, optimizer, inputs(), targets())
        seen.append(sum((p - s).square().sum() for p, s in zip(model.parameters(), start)).sqrt())
        seen.append(max((p.detach() - s).abs().max() for p, s in zip(model.parameters(), start)))
    return seen, model


@use
def stops_on_small_gradients(hp):
    model, call, optimizer = _with_gradients(hp)
    seen = []
    for _ in range(3):
        total = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
        seen.append(total.item())
        if total < 1e-3:
            break
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
    return seen, model


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


@use
def comparisons_and_sets(hp):
    model, _, _ = _with_gradients(hp)
    same = mlp()
    p = model[0].weight
    seen = [torch.equal(p, p.clone()), torch.allclose(p, p * 1), bool((p > 5).any()), p in set(model.parameters()),
            p is model[0].weight, p.dtype, p.shape, p.device.type, p.requires_grad, p.is_leaf,
            isinstance(p, nn.Parameter), p.grad.dim(), len(p)]
    for a, b in zip(model.parameters(), same.parameters()):
        seen.append(a.shape == b.shape)
    return seen


@use
def batched_updates(hp):
    model, call, optimizer = _with_gradients(hp)
    grads, parameters = [p.grad for p in model.parameters()], list(model.parameters())
    norms = torch._foreach_norm(grads)
    total = torch.stack(norms).norm()
    torch._foreach_div_(grads, total + 1.0)
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.99)
        torch._foreach_sub_(parameters, torch._foreach_mul(grads, 0.1))
    return norms, total, step(call, optimizer, inputs(), targets()), model
