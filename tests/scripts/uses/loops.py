"""Training loops: accumulation, clipping, schedules, averaging, and optimizers of all kinds."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw, classes, inputs, mlp, sgd, step, targets, train
from tests.scripts.use import use


@use
def plain(hp):
    return train(hp, mlp())


@use
def accumulates(hp):
    model = mlp()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in zip(inputs(12).split(4), targets(12).split(4)):
            loss = F.mse_loss(call(x), y) / 3
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, model, optimizer


@use
def sums_losses_before_backward(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    total = sum(F.mse_loss(call(x), y) for x, y in zip(inputs().split(4), targets().split(4)))
    total.backward()
    optimizer.step()
    return total, model, optimizer


@use
def clips_norm_and_value(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(call(inputs()), targets()).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return seen, model, optimizer


@use
def clips_other_norms(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for kind in (1.0, 3.0, float("inf")):
        optimizer.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind, foreach=False))
        optimizer.step()
    return seen, model, optimizer


@use
def tensor_learning_rate(hp):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), eps=1e-4)
    call, losses = hp.compile(model), []
    for _ in range(3):
        losses.append(step(call, optimizer, inputs(), targets()))
        optimizer.param_groups[0]["lr"].mul_(0.5)
    return losses, model, optimizer


@use
def a_group_added_later(hp):
    model = mlp()
    call, optimizer = hp.compile(model), torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    losses = [step(call, optimizer, inputs(), targets())]
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
    losses += [step(call, optimizer, inputs(), targets()) for _ in range(2)]
    return losses, model, optimizer


@use
def sharpness_aware(hp):
    """SAM: up the gradient, the gradient there, down from where it was."""
    model = mlp()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for _ in range(2):
        loss = F.mse_loss(call(inputs()), targets())
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, by in zip(model.parameters(), moved):
                p.add_(by)
        optimizer.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved):
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model, optimizer


@use
def swa_updates_batch_norm(hp):
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    call, optimizer = hp.compile(model), sgd(model)
    swa = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        step(call, optimizer, inputs(), targets())
        swa.update_parameters(model)
    torch.optim.swa_utils.update_bn([inputs(), inputs(4)], swa)
    return swa, swa.eval()(inputs()), model


@use
def steps_by_hand(hp):
    model = mlp()
    call, losses = hp.compile(model), []
    for _ in range(3):
        loss = F.mse_loss(call(inputs()), targets())
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return losses, model


@use
def steps_by_data(hp):
    model = mlp()
    call = hp.compile(model)
    for _ in range(3):
        F.mse_loss(call(inputs()), targets()).backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
            p.grad.zero_()
    return model


@use
def steps_in_hooks(hp):
    """Each parameter is stepped as its gradient comes, and the gradient dropped."""
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    call = hp.compile(model)
    losses = []
    for _ in range(3):
        loss = F.mse_loss(call(inputs()), targets())
        loss.backward()
        losses.append(loss.item())
    return losses, model


@use
def optimizer_hooks(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(sum(p.grad.norm().item() for p in o.param_groups[0]["params"])))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].detach().sum().item()))
    for _ in range(2):
        step(call, optimizer, inputs(), targets())
    return seen, model, optimizer


@use(refused="backward needs a second derivative")
def gradient_penalty(hp):
    """WGAN-GP's: the norm of the input's gradient is part of the loss."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        x = inputs().requires_grad_()
        optimizer.zero_grad()
        score = call(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, model, optimizer


@use
def input_gradients_for_an_attack(hp):
    """FGSM: the sign of the input's gradient, then training on what it makes."""
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    x = inputs().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(call(x), classes()), x)
    attacked = (x + 0.1 * grad.sign()).detach()
    losses = [step(call, optimizer, attacked, targets()) for _ in range(2)]
    return grad, losses, model, optimizer


class Losses(nn.Module):
    def __init__(self, losses):
        super().__init__()
        self.net, self.losses = mlp(), losses

    def forward(self, x, y, target):
        out = self.net(x)
        return sum(loss(out, y, target) for loss in self.losses)


def _losses(hp, *losses):
    model = Losses(losses)
    call, optimizer, seen = hp.compile(model), adamw(model), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(inputs(), targets(), classes())
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, model, optimizer


@use
def losses_for_classes(hp):
    return _losses(hp, lambda o, y, t: F.nll_loss(o.log_softmax(-1), t), lambda o, y, t: F.multi_margin_loss(o, t),
                   lambda o, y, t: F.binary_cross_entropy_with_logits(o, y.sigmoid(), pos_weight=torch.ones(4) * 2),
                   lambda o, y, t: F.kl_div(o.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
                   lambda o, y, t: F.cross_entropy(o, y.softmax(-1)))


@use
def weighs_losses_by_uncertainty(hp):
    """Log variances that the script holds and trains, outside the model."""
    model = mlp()
    call = hp.compile(model)
    variances = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), variances], lr=0.01, eps=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        out = call(inputs())
        parts = torch.stack([F.mse_loss(out, targets()), F.cross_entropy(out, classes())])
        loss = (parts * (-variances).exp() + variances).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, variances, variances.grad, model


@use(tolerance=3e-2)
def autocast(hp):
    model = mlp().float()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(call(inputs().float()), targets().float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use(tolerance=1e-2)
def scaled_fp16(hp):
    """GradScaler, with a step that is skipped because a gradient is infinite."""
    model = mlp().float()
    call, optimizer = hp.compile(model), sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=2)
    seen = []
    for number in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(call(inputs().float()), targets().float())
        scaler.scale(loss * (float("inf") if number == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), norm.isfinite().item()]
    return seen, model


@use(tolerance=5e-2)
def bfloat16_with_float32_masters(hp):
    """Weights in bfloat16; the optimizer steps float32 copies, which are written back."""
    model = mlp().bfloat16()
    call = hp.compile(model)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(2):
        F.mse_loss(call(inputs().bfloat16()).float(), targets().float()).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
    return masters, model


@use
def skips_bad_steps(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for scale in (1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs() * scale), targets())
        if not torch.isfinite(loss):
            seen.append("skipped")
            continue
        loss.backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        seen.append(loss.item())
    return seen, model, optimizer


@use
def gradients_made_anew_each_way(hp):
    """zero_grad in its variants, and a gradient that is set to None for one parameter only."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    for way in (lambda: optimizer.zero_grad(set_to_none=False), model.zero_grad, lambda: setattr(model[0].weight, "grad", None),
                lambda: [p.grad.zero_() for p in model.parameters() if p.grad is not None]):
        way()
        F.mse_loss(call(inputs()), targets()).backward()
        optimizer.step()
    return model, optimizer


@use
def hard_rows_only(hp):
    model = mlp()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for _ in range(2):
        optimizer.zero_grad()
        each = F.cross_entropy(call(inputs()), classes(), reduction="none")
        hard, which = each.topk(3)
        hard.mean().backward()
        optimizer.step()
        losses += [hard.detach(), which]
    return losses, model
