"""Losses by hand: functions of a model's outputs and of targets, as scripts have them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def sign_of(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


def focal(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    entropy = F.cross_entropy(out, target, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


def dice(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    shares, hot = out.softmax(1), F.one_hot(target, out.shape[1]).movedim(-1, 1).to(out.dtype)
    both = (shares * hot).sum((2, 3))
    return 1 - ((2 * both + 1) / (shares.sum((2, 3)) + hot.sum((2, 3)) + 1)).mean()


def info_nce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.1
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def supervised_contrastive(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    z = F.normalize(out, dim=-1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    same = (label[:, None] == label).fill_diagonal_(False)
    return -(scores.log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def barlow_twins(out: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (out, other))
    correlation = a.T @ b / len(a)
    own = torch.diagonal(correlation)
    return (own - 1).square().sum() + 0.01 * (correlation.square().sum() - own.square().sum())


def vicreg(out: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    centered = out - out.mean(0)
    covariance = centered.T @ centered / (len(out) - 1)
    apart = covariance.square().sum() - covariance.diagonal().square().sum()
    return F.mse_loss(out, other) + F.relu(1 - (out.var(0) + 1e-4).sqrt()).mean() + 0.1 * apart


def total_variation(out: torch.Tensor) -> torch.Tensor:
    return (out[..., 1:, :] - out[..., :-1, :]).abs().mean() + (out[..., 1:] - out[..., :-1]).abs().mean()


def ssim(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    a, b = F.avg_pool2d(out, 3, 1), F.avg_pool2d(target, 3, 1)
    va, vb = F.avg_pool2d(out * out, 3, 1) - a * a, F.avg_pool2d(target * target, 3, 1) - b * b
    both = F.avg_pool2d(out * target, 3, 1) - a * b
    return 1 - ((2 * a * b + 1e-4) * (2 * both + 9e-4) / ((a * a + b * b + 1e-4) * (va + vb + 9e-4))).mean()


def shifted(out: torch.Tensor, tokens: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), **how)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum()


def dpo(out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    chances = out[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(1)
    chosen, refused = chances.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - refused)).mean()


def ppo(out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    chances = out.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    ratio = torch.exp(chances - chances.detach().mul(1.1))
    gain = torch.linspace(-1, 1, ratio.numel(), dtype=out.dtype).view_as(ratio)
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * entropy_of(out)


def entropy_of(out: torch.Tensor) -> torch.Tensor:
    return -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()


def z_loss(out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return shifted(out, tokens) + 1e-2 * out.logsumexp(-1).square().mean()


def poly(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, label) + (1 - out.softmax(1).gather(1, label[:, None])).mean()


def center(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    hot = F.one_hot(label, 4).to(out.dtype)
    centers = hot.T @ out / hot.sum(0).clamp(min=1)[:, None]
    return (out - centers[label]).square().sum(1).mean()


def cox(out: torch.Tensor) -> torch.Tensor:
    return (out[:, 0].flip(0).logcumsumexp(0).flip(0) - out[:, 0]).mean()


def mixture(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mean, deviation = out[:, :2], F.softplus(out[:, 2:]) + 0.1
    return -torch.distributions.Normal(mean, deviation).log_prob(target[:, :2]).mean()


def mmd(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.cdist(a, b).square()).mean()

    return kernel(out + 1e-3, out) + kernel(target, target + 1e-3) - 2 * kernel(out, target)


def pinball(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    off, quantile = target - out, torch.tensor([0.1, 0.25, 0.5, 0.9], dtype=out.dtype)
    return torch.maximum(quantile * off, (quantile - 1) * off).mean()


def tversky(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p, hot = out.sigmoid().flatten(1), (target > 0).to(out.dtype).flatten(1)
    hit = (p * hot).sum(1)
    return (1 - (hit + 1) / (hit + 0.3 * (p * (1 - hot)).sum(1) + 0.7 * ((1 - p) * hot).sum(1) + 1)).mean()


def hard_examples(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, label, reduction="none").topk(3).values.mean()
