"""Uses of training loops with more than a loss after the graph: several models, calls, targets, or gradients of gradients.

As in `tests.scripts.losses`, outputs of any size stay sharded. Not a family that the tests run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from tests.scripts.loss_functions import info_nce, shifted
from tests.scripts.losses import STEPS, TOLERANCE, Images, Rows, Sequences
from tests.scripts.models import classes, inputs, mlp, sgd, targets
from tests.scripts.opinfo_outputs import small_outputs
from tests.scripts.use import Script, use


def loop(function: Callable[[Script], Any]) -> Callable[[Script], Any]:
    """Mark as a use, in which outputs of any size stay sharded."""

    @functools.wraps(function)
    def within(hp: Script) -> Any:
        torch.manual_seed(1)
        with small_outputs(wait=True):
            return function(hp)

    del within.__wrapped__
    return use(within, tolerance=TOLERANCE, limit_s=90)


def started(hp: Script, kind: type[Any] = Rows) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = kind().double()
    return hp.compile(model), model, sgd(model, lr=0.02)


def steps(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Step, inputs, values and labels; the optimizer steps after each."""
    for step in range(STEPS):
        optimizer.zero_grad()
        yield step, Rows.batch(step), targets() * (1 + 0.1 * step), (classes() + step) % 4
        optimizer.step()


def finish(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


@loop
def mixup(hp):
    call, model, optimizer = started(hp)
    seen = []
    for step, x, _, y in steps(optimizer):
        share, order = 0.3 + 0.1 * step, torch.randperm(8)
        out = call(share * x + (1 - share) * x[order])
        seen.append(finish(share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])))
    return seen, model, optimizer


@loop
def cutmix(hp):
    call, model, optimizer = started(hp, Images)
    seen = []
    for step, _, _, _ in steps(optimizer):
        x = Images.batch(step)
        x = torch.cat((x[..., :4], x.flip(0)[..., 4:]), -1)
        y = torch.arange(4) % 3
        shares = call(x).mean((2, 3)).log_softmax(1)
        seen.append(finish(0.5 * F.nll_loss(shares, y) + 0.5 * F.nll_loss(shares, y.flip(0))))
    return seen, model, optimizer


@loop
def gan(hp):
    generate, generator, first = started(hp)
    judge_of = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1)).double()
    judge, second = hp.compile(judge_of), sgd(judge_of, lr=0.02)
    ones, seen = torch.ones(8, 1, dtype=torch.float64), []
    for _, x, real, _ in steps(first):
        second.zero_grad()
        made = generate(x)
        of_judge = F.binary_cross_entropy_with_logits(judge(real), ones) + F.binary_cross_entropy_with_logits(
            judge(made.detach()), 0 * ones
        )
        seen.append(finish(of_judge))
        second.step()
        seen.append(finish(F.binary_cross_entropy_with_logits(judge(made), ones)))
    return seen, generator, judge_of, first, second


@loop
def wgan_with_penalty(hp):
    generate, generator, first = started(hp)
    judge = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    second, seen = sgd(judge, lr=0.02), []
    for _, x, real, _ in steps(first):
        made = generate(x)
        second.zero_grad()
        between = (0.5 * real + 0.5 * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        seen.append(finish(judge(made.detach()).mean() - judge(real).mean() + (slope.norm(dim=1) - 1).square().mean()))
        second.step()
        seen.append(finish(-judge(made).mean()))
    return seen, generator, judge, first, second


@loop
def gradient_penalty_of_outputs(hp):
    call, model, optimizer = started(hp)
    head, seen = nn.Linear(4, 1).double(), []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        (slope,) = torch.autograd.grad(head(out.tanh()).sum(), out, create_graph=True)
        seen.append(finish(F.cross_entropy(out, y) + 0.1 * slope.square().sum()))
    return seen, model, head, optimizer


@loop
def mean_teacher(hp):
    call, model, optimizer = started(hp)
    teacher, seen = copy.deepcopy(model).requires_grad_(False), []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        with torch.no_grad():
            wanted = teacher(x + 0.01).softmax(1)
        seen.append(finish(F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), wanted)))
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return seen, model, teacher, optimizer


@loop
def averaged_model(hp):
    call, model, optimizer = started(hp)
    averaged, seen = torch.optim.swa_utils.AveragedModel(model), []
    for _, x, _, y in steps(optimizer):
        seen.append(finish(F.cross_entropy(call(x), y)))
        averaged.update_parameters(model)
    return seen, averaged.module, optimizer


@loop
def distillation(hp):
    teacher = mlp().double().requires_grad_(False)
    call, model, optimizer = started(hp)
    teach, seen = hp.compile(teacher), []
    for _, x, _, y in steps(optimizer):
        out, wanted = call(x), teach(x)
        loss = F.kl_div((out / 2).log_softmax(1), (wanted / 2).softmax(1), reduction="batchmean") * 4
        seen.append(finish(0.5 * loss + 0.5 * F.cross_entropy(out, y)))
    return seen, model, optimizer


@loop
def perceptual(hp):
    features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 4, 3)).double().requires_grad_(False)
    call, model, optimizer = started(hp, Images)
    seen = []
    for step, *_ in steps(optimizer):
        out, wanted = call(Images.batch(step)), Images.batch(step + 1).repeat(1, 2, 1, 1)[:, :3]
        seen.append(finish(F.l1_loss(out, wanted) + F.mse_loss(features(out), features(wanted))))
    return seen, model, optimizer


@loop
def perceptual_compiled(hp):
    features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 4, 3)).double().requires_grad_(False)
    call, model, optimizer = started(hp, Images)
    look, seen = hp.compile(features), []
    for step, *_ in steps(optimizer):
        out, wanted = call(Images.batch(step)), Images.batch(step + 1).repeat(1, 2, 1, 1)[:, :3]
        seen.append(finish(F.l1_loss(out, wanted) + F.mse_loss(look(out), look(wanted).detach())))
    return seen, model, optimizer


@loop
def siamese(hp):
    call, model, optimizer = started(hp)
    return [finish(info_nce(call(x), call(x.flip(1)))) for _, x, _, _ in steps(optimizer)], model, optimizer


@loop
def triplets_of_three_calls(hp):
    call, model, optimizer = started(hp)
    seen = [finish(F.triplet_margin_loss(call(x), call(x + 0.1), call(-x))) for _, x, _, _ in steps(optimizer)]
    return seen, model, optimizer


@loop
def moco_queue(hp):
    call, model, optimizer = started(hp)
    slow, queue, seen = copy.deepcopy(model).requires_grad_(False), F.normalize(targets(12), dim=1), []
    for _, x, _, _ in steps(optimizer):
        query = F.normalize(call(x), dim=1)
        with torch.no_grad():
            key = F.normalize(slow(x + 0.05), dim=1)
        scores = torch.cat(((query * key).sum(1, keepdim=True), query @ queue.T), 1) / 0.2
        seen.append(finish(F.cross_entropy(scores, torch.zeros(8, dtype=torch.long))))
        queue = torch.cat((key, queue))[:12]
    return seen, queue, model, optimizer


@loop
def byol(hp):
    call, model, optimizer = started(hp)
    target, predictor, seen = copy.deepcopy(model).requires_grad_(False), nn.Linear(4, 4).double(), []
    for _, x, _, _ in steps(optimizer):
        seen.append(finish(2 - 2 * F.cosine_similarity(predictor(call(x)), target(x + 0.1)).mean()))
    return seen, model, predictor, optimizer


@loop
def r_drop(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        a, b = (F.dropout(call(x), 0.2) for _ in range(2))
        both = F.kl_div(a.log_softmax(1), b.log_softmax(1), log_target=True, reduction="batchmean")
        seen.append(finish(F.cross_entropy(a, y) + F.cross_entropy(b, y) + both))
    return seen, model, optimizer


@loop
def noise_in_the_loss(hp):
    call, model, optimizer = started(hp)
    seen = [finish(F.mse_loss(out + 0.1 * torch.randn_like(out), y)) for _, x, y, _ in steps(optimizer) for out in [call(x)]]
    return seen, model, optimizer


@loop
def variational(hp):
    call, model, optimizer = started(hp)
    decoder, seen = nn.Linear(2, 16).double(), []
    for _, x, _, _ in steps(optimizer):
        mean, log_variance = call(x).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        seen.append(finish(F.mse_loss(decoder(z), x) + 0.1 * divergence))
    return seen, model, decoder, optimizer


@loop
def vector_quantized(hp):
    call, model, optimizer = started(hp)
    book, seen = nn.Embedding(6, 4).double(), []
    for _, x, _, _ in steps(optimizer):
        out = call(x)
        near = book(torch.cdist(out, book.weight).argmin(1))
        through = out + (near - out).detach()
        seen.append(finish(through.square().mean() + F.mse_loss(near, out.detach()) + 0.25 * F.mse_loss(out, near.detach())))
    return seen, model, book, optimizer


@loop
def reinforce(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, y, _ in steps(optimizer):
        policy = torch.distributions.Categorical(logits=call(x))
        action = policy.sample()
        seen.append((finish(-(policy.log_prob(action) * (y.gather(1, action[:, None]).squeeze(1))).mean()), action))
    return seen, model, optimizer


@loop
def actor_critic(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        chances, value = out[:, :3].log_softmax(1), out[:, 3]
        gain = torch.linspace(-1, 1, 8, dtype=torch.float64) - value
        seen.append(finish(-(chances.gather(1, (y % 3)[:, None]).squeeze(1) * gain.detach()).mean() + gain.square().mean()))
    return seen, model, optimizer


@loop
def fast_gradient_sign(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(call(x), y), x)
        seen.append(finish(F.cross_entropy(call((x + 0.1 * slope / slope.norm()).detach()), y)))
    return seen, model, optimizer


@loop
def uncertainty_weights(hp):
    call, model, optimizer = started(hp)
    weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    own, seen = torch.optim.SGD([weights], lr=0.05), []
    for _, x, target, y in steps(optimizer):
        own.zero_grad()
        out = call(x)
        terms = torch.stack((F.cross_entropy(out, y), F.mse_loss(out, target)))
        seen.append(finish((terms * torch.exp(-weights) + weights).sum()))
        own.step()
    return seen, weights.detach(), model, optimizer


@loop
def learned_centers(hp):
    call, model, optimizer = started(hp)
    centers, seen = nn.Embedding(4, 4).double(), []
    optimizer.add_param_group({"params": centers.parameters()})
    for _, x, _, y in steps(optimizer):
        seen.append(finish((call(x) - centers(y)).square().sum(1).mean()))
    return seen, model, centers, optimizer


@loop
def loss_module_with_weights(hp):
    call, model, optimizer = started(hp)
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0, dtype=torch.float64), label_smoothing=0.05)
    return [finish(criterion(call(x), y)) for _, x, _, y in steps(optimizer)], model, optimizer


@loop
def metric_objects(hp):
    call, model, optimizer = started(hp)
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
    mean, seen = torchmetrics.MeanMetric(), []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        loss = F.cross_entropy(out, y)
        accuracy.update(out.detach(), y)
        mean.update(loss.detach())
        seen.append(finish(loss))
    return seen, accuracy.compute(), mean.compute(), model, optimizer


@loop
def losses_kept_in_a_list(hp):
    call, model, optimizer = started(hp)
    kept, outs = [], []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        kept.append(loss.detach())
        outs.append(out.detach())
    return torch.stack(kept), torch.cat(outs), model, optimizer


@loop
def loss_changes_in_step_3(hp):
    call, model, optimizer = started(hp)
    seen = [
        finish(F.mse_loss(call(x), target) if step < 3 else F.cross_entropy(call(x), y))
        for step, x, target, y in steps(optimizer)
    ]
    return seen, model, optimizer


@loop
def weight_of_a_term_changes(hp):
    call, model, optimizer = started(hp)
    seen = []
    for step, x, target, y in steps(optimizer):
        out = call(x)
        seen.append(finish(F.cross_entropy(out, y) + 0.1 * step * F.mse_loss(out, target)))
    return seen, model, optimizer


@loop
def accumulation(hp):
    call, model, optimizer = started(hp)
    seen = [[finish(F.cross_entropy(call(x + k), y) / 3) for k in range(3)] for _, x, _, y in steps(optimizer)]
    return seen, model, optimizer


@loop
def two_losses_two_backwards(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, target, y in steps(optimizer):
        out = call(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        seen.append(finish(F.mse_loss(out, target)))
    return seen, model, optimizer


@loop
def balanced_by_gradients(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, target, y in steps(optimizer):
        out = call(x)
        terms = [F.cross_entropy(out, y), F.mse_loss(out, target)]
        sizes = [torch.autograd.grad(term, out, retain_graph=True)[0].norm().detach() for term in terms]
        seen.append(finish(sum(term / size for term, size in zip(terms, sizes, strict=True))))
    return seen, model, optimizer


@loop
def clipped_and_scaled(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        loss = F.cross_entropy(call(x), y)
        (loss * 64).backward()
        for p in model.parameters():
            p.grad.div_(64)
        seen.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
    return seen, model, optimizer


@loop
def skipped_if_not_finite(hp):
    call, model, optimizer = started(hp)
    seen = []
    for step, x, _, y in steps(optimizer):
        loss = F.cross_entropy(call(x), y) * (float("nan") if step == 2 else 1.0)
        seen.append(bool(torch.isfinite(loss)))
        if seen[-1]:
            loss.backward()
    return seen, model, optimizer


@loop
def lbfgs(hp):
    model = Rows().double()
    call, optimizer = hp.compile(model), torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(call(inputs()), targets())
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)], model


@loop
def evaluation_between_steps(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        seen.append(finish(F.cross_entropy(call(x), y)))
        with torch.no_grad():
            out = call(x[:4])
            seen.append((F.cross_entropy(out, y[:4]).item(), (out.argmax(1) == y[:4]).sum().item()))
    return seen, model, optimizer


@loop
def diffusion(hp):
    call, model, optimizer = started(hp, Images)
    seen = []
    for step, *_ in steps(optimizer):
        noise, level = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
        out = call(Images.batch(step) * (1 - level[:, None, None, None]))
        weight = 1 / (level + 0.1)
        seen.append(finish((weight * F.mse_loss(out, noise, reduction="none").mean((1, 2, 3))).mean()))
    return seen, model, optimizer


@loop
def reward_model_on_logits(hp):
    judge = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double().requires_grad_(False)
    call, model, optimizer = started(hp, Sequences)
    seen = []
    for step, *_ in steps(optimizer):
        x = Sequences.batch(step)
        out = call(x)
        seen.append(finish(shifted(out, x) - 0.1 * judge(out.softmax(-1)).mean()))
    return seen, model, optimizer


@loop
def hooks_on_outputs(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        out.register_hook(lambda g: seen.append(g.norm().item()))
        seen.append(finish(F.cross_entropy(out, y)))
    return seen, model, optimizer


@loop
def retained_gradient(hp):
    call, model, optimizer = started(hp)
    seen = []
    for _, x, _, y in steps(optimizer):
        out = call(x)
        out.retain_grad()
        seen.append((finish(F.cross_entropy(out, y)), out.grad.clone()))
    return seen, model, optimizer
