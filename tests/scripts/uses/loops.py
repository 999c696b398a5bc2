"""Training loops: accumulation, clipping, schedules, averaging, and optimizers of all kinds."""
from __future__ import annotations

import copy

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
def clips_by_group(hp):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
        seen += [nn.utils.clip_grad_norm_(layer.parameters(), 0.02) for layer in (model[0], model[2], model[4])]
        seen.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
    return seen, model, optimizer


@use
def clips_adaptively(hp):
    """AGC: each row's gradient against its weight."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(call(inputs()), targets()).backward()
        for p in model.parameters():
            weight, grad = (t.norm(dim=-1, keepdim=True) if t.dim() > 1 else t.norm() for t in (p.detach(), p.grad))
            limit = weight.clamp(min=1e-3) * 0.01
            p.grad.detach().copy_(torch.where(grad > limit, p.grad * (limit / grad.clamp(min=1e-6)), p.grad))
        optimizer.step()
    return model, optimizer


def _scheduled(hp, make, steps=4, metric=False):
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    scheduler = make(optimizer)
    for _ in range(steps):
        loss = step(call, optimizer, inputs(), targets())
        scheduler.step(*([loss] if metric else []))
        seen += [loss, optimizer.param_groups[0]["lr"]]
    return seen, model, optimizer


@use
def one_cycle(hp):
    return _scheduled(hp, lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5))


@use
def warmup_then_cosine(hp):
    kinds = torch.optim.lr_scheduler
    return _scheduled(hp, lambda optimizer: kinds.SequentialLR(
        optimizer, [kinds.LinearLR(optimizer, 0.1, total_iters=2), kinds.CosineAnnealingLR(optimizer, 3)], milestones=[2]))


@use
def plateau(hp):
    return _scheduled(hp, lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), metric=True)


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
def groups_of_parameters(hp):
    model = mlp()
    decay, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1e-2, eps=1e-4)
    return train(hp, model, optimizer=optimizer)


@use
def layerwise_learning_rates(hp):
    model = mlp()
    groups = [{"params": layer.parameters(), "lr": 0.01 * 2 ** i} for i, layer in enumerate(model) if list(layer.parameters())]
    return train(hp, model, optimizer=torch.optim.SGD(groups, momentum=0.9, nesterov=True))


@use
def a_group_added_later(hp):
    model = mlp()
    call, optimizer = hp.compile(model), torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    losses = [step(call, optimizer, inputs(), targets())]
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
    losses += [step(call, optimizer, inputs(), targets()) for _ in range(2)]
    return losses, model, optimizer


def _with(hp, make, steps=3):
    model = mlp()
    return train(hp, model, optimizer=make(model.parameters()), steps=steps)


@use
def adam_and_amsgrad(hp):
    return _with(hp, lambda p: torch.optim.Adam(p, 0.01, eps=1e-4, amsgrad=True))


@use
def fused_and_foreach(hp):
    return [_with(hp, lambda p, how=how: torch.optim.AdamW(p, 0.01, eps=1e-4, **how))
            for how in ({"fused": True}, {"foreach": True}, {"foreach": False})]


@use
def nadam_radam(hp):
    return [_with(hp, lambda p, kind=kind: kind(p, 0.01, eps=1e-4)) for kind in (torch.optim.NAdam, torch.optim.RAdam)]


@use
def rmsprop_adagrad(hp):
    return (_with(hp, lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-4, momentum=0.5, centered=True)),
            _with(hp, lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-4)))


@use
def adamax_adadelta_asgd(hp):
    return [_with(hp, make) for make in (lambda p: torch.optim.Adamax(p, 0.01, eps=1e-4),
                                         lambda p: torch.optim.Adadelta(p, 0.5, eps=1e-3),
                                         lambda p: torch.optim.ASGD(p, 0.05))]


@use
def rprop(hp):
    return _with(hp, lambda p: torch.optim.Rprop(p, 0.01))


@use
def adafactor(hp):
    return _with(hp, lambda p: torch.optim.Adafactor(p, 0.01))


@use(tolerance=1e-2)  # it orthogonalizes in bfloat16
def muon_beside_adamw(hp):
    model = mlp()
    matrices, rest = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() < 2]
    call = hp.compile(model)
    both = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01, eps=1e-4)]
    losses = []
    for _ in range(2):
        loss = F.mse_loss(call(inputs()), targets())
        loss.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@use
def lbfgs(hp):
    model = mlp()
    call = hp.compile(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets())
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return losses, model


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
def lookahead(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    slow = [p.detach().clone() for p in model.parameters()]
    losses = []
    for number in range(4):
        losses.append(step(call, optimizer, inputs(), targets()))
        if number % 2:
            with torch.no_grad():
                for p, anchor in zip(model.parameters(), slow):
                    anchor.add_(p - anchor, alpha=0.5)
                    p.copy_(anchor)
    return losses, slow, model, optimizer


@use
def ema_by_hand(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        step(call, optimizer, inputs(), targets())
        for name, p in model.named_parameters():
            ema[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    return ema, model


@use
def ema_and_swa(hp):
    averages = torch.optim.swa_utils
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    ema = averages.AveragedModel(model, multi_avg_fn=averages.get_ema_multi_avg_fn(0.9))
    swa = averages.AveragedModel(model)
    schedule = averages.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(3):
        step(call, optimizer, inputs(), targets())
        schedule.step()
        ema.update_parameters(model)
        swa.update_parameters(model)
    return ema, swa, ema(inputs()), swa(inputs()), model


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


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = state["average"].lerp(p.grad, 1 - group["betas"][0])
                p.add_(torch.tanh(update * 1e3), alpha=-group["lr"])
                state["average"].lerp_(p.grad, 1 - group["betas"][1])


@use
def an_optimizer_of_its_own(hp):
    return _with(hp, lambda p: Lion(p, 0.01))


class Lars(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * (p.norm() / (p.grad.norm() + 1e-3))
        return super().step(closure)


@use
def an_optimizer_on_top_of_one(hp):
    return _with(hp, lambda p: Lars(p, 0.01, momentum=0.9))


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


@use
def label_smoothing_and_weights(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    y = classes().clone()
    y[2] = -100
    criterion, losses = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = criterion(call(inputs()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


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
def losses_for_regression(hp):
    return _losses(hp, lambda o, y, t: F.l1_loss(o, y), lambda o, y, t: F.smooth_l1_loss(o, y),
                   lambda o, y, t: F.huber_loss(o, y, delta=0.3), lambda o, y, t: F.gaussian_nll_loss(o, y, y.exp()),
                   lambda o, y, t: F.poisson_nll_loss(o, y.abs()))


@use
def losses_for_classes(hp):
    return _losses(hp, lambda o, y, t: F.nll_loss(o.log_softmax(-1), t), lambda o, y, t: F.multi_margin_loss(o, t),
                   lambda o, y, t: F.binary_cross_entropy_with_logits(o, y.sigmoid(), pos_weight=torch.ones(4) * 2),
                   lambda o, y, t: F.kl_div(o.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
                   lambda o, y, t: F.cross_entropy(o, y.softmax(-1)))


@use
def losses_of_pairs(hp):
    return _losses(hp, lambda o, y, t: F.cosine_embedding_loss(o, y, (t % 2) * 2 - 1),
                   lambda o, y, t: F.triplet_margin_loss(o, y, o.flip(0)),
                   lambda o, y, t: F.margin_ranking_loss(o[:, 0], o[:, 1], torch.ones(8)))


@use
def focal_and_dice(hp):
    def focal(out, y, target):
        p = out.softmax(-1).gather(1, target[:, None]).squeeze(1)
        return -((1 - p) ** 2 * p.log()).mean()

    def dice(out, y, target):
        p, hot = out.softmax(-1), F.one_hot(target, 4)
        return 1 - (2 * (p * hot).sum(0) + 1).div(p.sum(0) + hot.sum(0) + 1).mean()

    return _losses(hp, focal, dice)


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
def early_stopping_restores_the_best(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model, lr=0.5)
    best, kept, losses = float("inf"), None, []
    for _ in range(4):
        loss = step(call, optimizer, inputs(), targets())
        losses.append(loss)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return losses, call(inputs()), model


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
def curriculum_with_weights(hp):
    """Rows weighted by their last loss."""
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    weights = torch.ones(8)
    for _ in range(3):
        optimizer.zero_grad()
        each = (call(inputs()) - targets()).square().mean(1)
        (each * weights).mean().backward()
        optimizer.step()
        weights = each.detach() / each.detach().mean()
    return weights, model


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


@use
def mixup(hp):
    model = mlp()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    for share in (0.3, 0.8):
        order = torch.randperm(8)
        x = share * inputs() + (1 - share) * inputs()[order]
        optimizer.zero_grad()
        out = call(x)
        loss = share * F.cross_entropy(out, classes()) + (1 - share) * F.cross_entropy(out, classes()[order])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer
