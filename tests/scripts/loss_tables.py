"""Losses and metrics by the kind of a model's outputs: values, classes of rows, tokens, and maps of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchmetrics.functional as metrics
from torch.nn import functional as F

from tests.scripts.loss_functions import (
    barlow_twins,
    center,
    cox,
    dice,
    dpo,
    entropy_of,
    focal,
    hard_examples,
    info_nce,
    masked_mean,
    mixture,
    mmd,
    pinball,
    poly,
    ppo,
    shifted,
    sign_of,
    ssim,
    supervised_contrastive,
    total_variation,
    tversky,
    vicreg,
    z_loss,
)

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

VALUES: dict[str, Loss] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "mse_sum": lambda o, t: F.mse_loss(o, t, reduction="sum"),
    "mse_weighted": lambda o, t: (F.mse_loss(o, t, reduction="none") * torch.arange(1.0, 5.0, dtype=o.dtype)).mean(),
    "rmse": lambda o, t: F.mse_loss(o, t).sqrt(),
    "log_cosh": lambda o, t: torch.log(torch.cosh(o - t)).mean(),
    "charbonnier": lambda o, t: ((o - t).square() + 1e-6).sqrt().mean(),
    "pinball": pinball,
    "binary_cross_entropy": lambda o, t: F.binary_cross_entropy(o.sigmoid(), t.sigmoid()),
    "bce_with_logits": lambda o, t: F.binary_cross_entropy_with_logits(o, (t > 0).to(o.dtype)),
    "bce_pos_weight": lambda o, t: F.binary_cross_entropy_with_logits(
        o, (t > 0).to(o.dtype), pos_weight=torch.arange(1.0, 5.0, dtype=o.dtype)
    ),
    "soft_margin_loss": lambda o, t: F.soft_margin_loss(o, sign_of(t)),
    "multilabel_soft_margin_loss": lambda o, t: F.multilabel_soft_margin_loss(o, (t > 0).to(o.dtype)),
    "multilabel_margin_loss": lambda o, t: F.multilabel_margin_loss(o, torch.tensor([[3, 0, -1, 1]] * 8)),
    "hinge_embedding_loss": lambda o, t: F.hinge_embedding_loss(o, sign_of(t)),
    "poisson_nll_loss": F.poisson_nll_loss,
    "gaussian_nll_loss": lambda o, t: F.gaussian_nll_loss(o, t, F.softplus(o) + 0.1),
    "kl_div": lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "kl_div_of_logs": lambda o, t: F.kl_div(o.log_softmax(1), t.log_softmax(1), log_target=True, reduction="sum"),
    "jensen_shannon": lambda o, t: (
        (m := ((o.softmax(1) + t.softmax(1)) / 2).log()).exp().mul(0).sum()
        + (F.kl_div(m, o.softmax(1), reduction="sum") + F.kl_div(m, t.softmax(1), reduction="sum")) / 2
    ),
    "cross_entropy_of_shares": lambda o, t: F.cross_entropy(o, t.softmax(1)),
    "label_smoothing_by_hand": lambda o, t: -(o.log_softmax(1) * (0.9 * t.softmax(1) + 0.025)).sum(1).mean(),
    "cosine_similarity": lambda o, t: 1 - F.cosine_similarity(o, t).mean(),
    "cosine_embedding_loss": lambda o, t: F.cosine_embedding_loss(o, t, sign_of(t[:, 0]), margin=0.1),
    "pairwise_distance": lambda o, t: F.pairwise_distance(o, t).mean(),
    "margin_ranking_loss": lambda o, t: F.margin_ranking_loss(o[:, 0], o[:, 1], sign_of(t[:, 0]), margin=0.2),
    "triplet_margin_loss": lambda o, t: F.triplet_margin_loss(o, t, o.roll(1, 0)),
    "triplet_with_distance": lambda o, t: F.triplet_margin_with_distance_loss(o, t, t.flip(0)),
    "norm_of_difference": lambda o, t: torch.linalg.vector_norm(o - t),
    "mmd": mmd,
    "mixture_density": mixture,
    "cox": lambda o, t: cox(o),
    "info_nce": info_nce,
    "barlow_twins": barlow_twins,
    "vicreg": vicreg,
    "halves": lambda o, t: F.mse_loss(o[:, :2], o[:, 2:]),
    "wasserstein_1d": lambda o, t: (o.flatten().sort().values - t.flatten().sort().values).abs().mean(),
    "penalty_of_size": lambda o, t: F.mse_loss(o, t) + 1e-2 * o.abs().amax() + 1e-2 * o.square().sum(),
    "masked_mse": lambda o, t: masked_mean((o - t).square(), (t > 0).to(o.dtype)),
    "masked_select": lambda o, t: (o[t > 0] - t[t > 0]).square().mean(),
    "clamped": lambda o, t: (o.clamp(-0.3, 0.3) - t).square().mean(),
    "where": lambda o, t: torch.where(t > 0, (o - t).square(), (o - t).abs()).mean(),
    "logsumexp": lambda o, t: o.logsumexp(0).sum() - (o * t).sum(),
    "einsum": lambda o, t: torch.einsum("bi,bj->ij", o, t).square().mean(),
    "pearson": lambda o, t: 1 - torch.corrcoef(torch.stack((o.flatten(), t.flatten())))[0, 1],
    "variance": lambda o, t: o.var(0).mean() + F.mse_loss(o, t),
    "cumulative": lambda o, t: (o.cumsum(0) - t.cumsum(0)).square().mean(),
    "quantile": lambda o, t: (o - t).abs().quantile(0.75),
    "concatenated": lambda o, t: torch.cat((o, t)).square().mean(),
    "several_terms": lambda o, t: sum(((o - t).abs() ** p).mean() for p in (1.0, 1.5, 2.0)),
}
LABELS: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy_sum": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "cross_entropy_smoothed": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "cross_entropy_weighted": lambda o, y: F.cross_entropy(o, y, torch.arange(1.0, 5.0, dtype=o.dtype)),
    "cross_entropy_ignored": lambda o, y: F.cross_entropy(o, y.masked_fill(y == 1, -100)),
    "cross_entropy_per_row": lambda o, y: (F.cross_entropy(o, y, reduction="none") * torch.arange(8.0, dtype=o.dtype)).mean(),
    "nll_loss": lambda o, y: F.nll_loss(o.log_softmax(1), y),
    "gather": lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(),
    "multi_margin_loss": F.multi_margin_loss,
    "focal": focal,
    "poly": poly,
    "center": center,
    "hard_examples": hard_examples,
    "supervised_contrastive": supervised_contrastive,
    "one_hot_mse": lambda o, y: F.mse_loss(o.softmax(1), F.one_hot(y, 4).to(o.dtype)),
    "logit_adjusted": lambda o, y: F.cross_entropy(o + torch.arange(1.0, 5.0, dtype=o.dtype).log(), y),
    "temperature": lambda o, y: F.cross_entropy(o / 2.5, y),
    "arcface": lambda o, y: F.cross_entropy(
        torch.where(F.one_hot(y, 4).bool(), torch.cos(torch.acos(torch.tanh(o) * 0.9) + 0.2), torch.tanh(o)) * 4, y
    ),
    "symmetric_cross_entropy": lambda o, y: (
        F.cross_entropy(o, y) - (o.softmax(1) * F.one_hot(y, 4).to(o.dtype).clamp(min=1e-4).log()).sum(1).mean()
    ),
    "generalized_cross_entropy": lambda o, y: ((1 - o.softmax(1).gather(1, y[:, None]).squeeze(1) ** 0.7) / 0.7).mean(),
    "confidence_penalty": lambda o, y: F.cross_entropy(o, y) - 0.1 * entropy_of(o),
    "indexed": lambda o, y: -o.log_softmax(1)[torch.arange(8), y].mean(),
    "long_sum_of_columns": lambda o, y: F.cross_entropy(o, y) + o.sum(0).square().mean(),
}
TOKENS: dict[str, Loss] = {
    "shifted": shifted,
    "shifted_sum": lambda o, x: shifted(o, x, reduction="sum"),
    "z_loss": z_loss,
    "dpo": dpo,
    "ppo": ppo,
    "shifted_ignored": lambda o, x: F.cross_entropy(o.transpose(1, 2), x.roll(-1, 1).masked_fill(x == 3, -100)),
    "soft_capped": lambda o, x: shifted(5 * torch.tanh(o / 5), x),
    "unlikelihood": lambda o, x: -torch.log(1 - o.softmax(-1).gather(-1, x[..., None]) * 0.9).mean(),
    "masked_tokens": lambda o, x: masked_mean(
        F.cross_entropy(o.flatten(0, 1), x.flatten(), reduction="none"), (x.flatten() > 2).to(o.dtype)
    ),
    "per_sequence": lambda o, x: (
        F.cross_entropy(o.transpose(1, 2), x, reduction="none").sum(1) / (x != 0).sum(1).clamp(min=1)
    ).mean(),
    "upcast": lambda o, x: shifted(o.to(torch.float64), x.long()),
    "ctc_loss": lambda o, x: F.ctc_loss(
        o.transpose(0, 1).log_softmax(-1), (x[:, :2] % 11) + 1, torch.full((8,), 6), torch.full((8,), 2)
    ),
    "last_token": lambda o, x: F.cross_entropy(o[:, -1], x[:, 0]),
    "best_of_tokens": lambda o, x: F.cross_entropy(o.amax(1), x[:, 0]),
    "entropy_bonus": lambda o, x: shifted(o, x) - 0.1 * entropy_of(o),
    "moved_dims": lambda o, x: F.cross_entropy(o.movedim(-1, 1), x),
}
MAPS: dict[str, Loss] = {
    "segmentation": F.cross_entropy,
    "dice": dice,
    "dice_and_cross_entropy": lambda o, y: F.cross_entropy(o, y) + dice(o, y),
    "segmentation_ignored": lambda o, y: F.cross_entropy(o, y.masked_fill(y == 2, 255), ignore_index=255),
    "jaccard": lambda o, y: (
        1 - ((p := o.softmax(1)) * (h := F.one_hot(y, 3).movedim(-1, 1).to(o.dtype))).sum() / (p + h - p * h).sum()
    ),
    "total_variation": lambda o, y: F.cross_entropy(o, y) + 0.1 * total_variation(o),
    "focal_map": focal,
    "tversky": lambda o, y: tversky(o, F.one_hot(y, 3).movedim(-1, 1).to(o.dtype) - 0.5),
    "ssim": lambda o, y: ssim(o, F.one_hot(y, 3).movedim(-1, 1).to(o.dtype)),
    "upsampled": lambda o, y: F.cross_entropy(
        F.interpolate(o, scale_factor=2), y.repeat_interleave(2, 1).repeat_interleave(2, 2)
    ),
    "pooled": lambda o, y: F.mse_loss(F.adaptive_avg_pool2d(o, 1).flatten(1), torch.ones(4, 3, dtype=o.dtype)),
    "spectrum": lambda o, y: torch.fft.rfft2(o).abs().square().mean(),
    "gradient_map": lambda o, y: (o.diff(dim=-1) - 0.1).abs().mean(),
    "gram": lambda o, y: (o.flatten(2) @ o.flatten(2).mT / 64 - torch.eye(3, dtype=o.dtype)).square().mean(),
}
METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "accuracy": lambda o, y: (o.argmax(1) == y).float().mean().item(),
    "top_2": lambda o, y: (o.topk(2).indices == y[:, None]).any(1).sum().item(),
    "count": lambda o, y: int((o.argmax(-1) == y).sum()),
    "confidence": lambda o, y: o.softmax(1).max(1).values.mean(),
    "perplexity": lambda o, y: F.cross_entropy(o, y).exp().item(),
    "histogram": lambda o, y: torch.bincount(o.argmax(1), minlength=4),
    "confusion": lambda o, y: torch.zeros(4, 4).index_put((y, o.argmax(1)), torch.ones(8), accumulate=True),
    "tm_accuracy": lambda o, y: metrics.accuracy(o, y, task="multiclass", num_classes=4),
    "tm_f1": lambda o, y: metrics.f1_score(o, y, task="multiclass", num_classes=4, average="macro"),
    "tm_auroc": lambda o, y: metrics.auroc(o, y, task="multiclass", num_classes=4),
    "tm_confusion": lambda o, y: metrics.confusion_matrix(o, y, task="multiclass", num_classes=4),
    "tm_calibration": lambda o, y: metrics.calibration_error(o.softmax(1), y, task="multiclass", num_classes=4),
    "tm_cohen_kappa": lambda o, y: metrics.cohen_kappa(o, y, task="multiclass", num_classes=4),
    "tm_hinge": lambda o, y: metrics.hinge_loss(o, y, task="multiclass", num_classes=4),
    "numpy": lambda o, y: float(o.detach().numpy().std()),
    "largest": lambda o, y: o.abs().max().item(),
    "finite": lambda o, y: bool(o.isfinite().all()),
    "list": lambda o, y: o[0].tolist(),
    "unique": lambda o, y: o.argmax(1).unique(),
    "norm": lambda o, y: o.norm().item(),
}
