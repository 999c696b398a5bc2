"""Heads of large vocabularies and losses on them, each a small model with a batch, for tests of the loss in chunks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, TOKENS, WIDTH, WORDS, PIXELS = 8, 6, 4, 32, 4
Loss = Callable[["Headed", Tensor, Tensor], Any]


class Headed(nn.Module):
    """Hidden states of tokens, or of pixels; a head; a loss that reads both. Other parts are given by name."""

    def __init__(self, loss: Loss, **parts: Any) -> None:
        super().__init__()
        self.words, self.body, self.loss = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), loss
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.loss(self, torch.tanh(self.body(self.words(tokens))), labels)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, WORDS, (ROWS, TOKENS))
    labels[0, :4], labels[3], labels[5, 2] = -100, -100, -100
    return torch.randint(0, WORDS, (ROWS, TOKENS)), labels


def ce(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def shifted(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return ce(logits[:, :-1], labels[:, 1:], **options)


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp(min=0), WORDS).double()


def cap(logits: Tensor, at: float = 3.0) -> Tensor:
    return torch.tanh(logits / at) * at


def z_loss(logits: Tensor) -> Tensor:
    return 1e-2 * logits.logsumexp(-1).pow(2).mean()


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return ce(logits, labels, reduction="none")


def with_masked_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    return ce(logits, labels) + 1e-2 * (logits.logsumexp(-1).pow(2) * mask).sum() / mask.sum()


def by_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.logsumexp(-1) - logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)).mean()


def upsampled(images: Tensor) -> Tensor:
    return F.interpolate(images, scale_factor=2, mode="nearest")


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    nll = per_token(logits, labels)
    return ((1 - torch.exp(-nll)) ** 2 * nll).sum() / (labels != -100).sum()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    mask = (labels >= 0).double()
    return -(picked * mask).sum() / mask.sum()


def distilled(student: Tensor, teacher: Tensor, t: float = 2.0) -> Tensor:
    return F.kl_div((student / t).log_softmax(-1), (teacher / t).softmax(-1), reduction="batchmean") * t * t


def weights() -> Tensor:
    return torch.linspace(0.5, 2.0, WORDS)


def pixels(model: Headed, hidden: Tensor, labels: Tensor, loss: Loss) -> Any:
    images = hidden[:, :4].reshape(ROWS, WIDTH, 4, 1).expand(-1, -1, -1, PIXELS)
    marks = labels[:, :4].reshape(ROWS, 4, 1).expand(-1, -1, PIXELS)
    return loss(model, images, marks)


def frozen(make: nn.Module) -> nn.Module:
    return make.requires_grad_(False)


def tied(model: Headed, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.words.weight)


def teacher_logits(model: Headed, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return model.teacher(hidden.detach())


L = nn.Linear
HEADS: dict[str, tuple[Loss, Callable[[], dict[str, Any]]]] = {
    "plain": (lambda m, h, y: ce(m.head(h), y), dict),
    "sum": (lambda m, h, y: ce(m.head(h), y, reduction="sum"), dict),
    "sum over rows": (lambda m, h, y: ce(m.head(h), y, reduction="sum") / ROWS, dict),
    "ignored index": (lambda m, h, y: ce(m.head(h), y.clamp(min=0), ignore_index=3), dict),
    "smoothed": (lambda m, h, y: ce(m.head(h), y, label_smoothing=0.1), dict),
    "class weights": (lambda m, h, y: ce(m.head(h), y, weight=m.weights), lambda: {"weights": weights()}),
    "weights and smoothing": (lambda m, h, y: ce(m.head(h), y, weight=m.weights, label_smoothing=0.2),
                              lambda: {"weights": weights()}),
    "shifted": (lambda m, h, y: shifted(m.head(h), y), dict),
    "shifted labels": (lambda m, h, y: ce(m.head(h), F.pad(y, (0, 1), value=-100)[:, 1:]), dict),
    "shifted hidden": (lambda m, h, y: ce(m.head(h[:, :-1]), y[:, 1:]), dict),
    "shifted and smoothed": (lambda m, h, y: shifted(m.head(h), y, label_smoothing=0.1), dict),
    "rows as dim 1": (lambda m, h, y: F.cross_entropy(m.head(h).transpose(1, 2), y), dict),
    "z-loss": (lambda m, h, y: ce(m.head(h), y) + z_loss(m.head(h)), dict),
    "z-loss of the same logits": (lambda m, h, y: (lambda x: ce(x, y) + z_loss(x))(m.head(h)), dict),
    "squares of logits": (lambda m, h, y: (lambda x: ce(x, y) + 1e-3 * x.pow(2).mean())(m.head(h)), dict),
    "masked z-loss": (lambda m, h, y: with_masked_z_loss(m.head(h), y), dict),
    "soft cap": (lambda m, h, y: ce(cap(m.head(h)), y), dict),
    "soft cap and z-loss": (lambda m, h, y: (lambda x: ce(x, y) + z_loss(x))(cap(m.head(h))), dict),
    "scaled": (lambda m, h, y: ce(m.head(h) * 0.5, y), dict),
    "scaled by a parameter": (lambda m, h, y: ce(m.head(h) * m.scale, y),
                              lambda: {"scale": nn.Parameter(torch.tensor(0.7))}),
    "scaled by columns": (lambda m, h, y: ce(m.head(h) * m.scale, y),
                          lambda: {"scale": nn.Parameter(torch.linspace(0.5, 1.5, WORDS))}),
    "temperature": (lambda m, h, y: ce(m.head(h) / m.scale.exp(), y), lambda: {"scale": nn.Parameter(torch.tensor(0.2))}),
    "bias": (lambda m, h, y: ce(m.head(h), y), lambda: {"head": L(WIDTH, WORDS)}),
    "bias of its own": (lambda m, h, y: ce(m.head(h) + m.bias, y), lambda: {"bias": nn.Parameter(torch.zeros(WORDS))}),
    "frozen head": (lambda m, h, y: ce(m.head(h), y), lambda: {"head": frozen(L(WIDTH, WORDS))}),
    "tied": (lambda m, h, y: ce(tied(m, h), y), lambda: {"head": None}),
    "tied with bias": (lambda m, h, y: ce(tied(m, h) + m.bias, y),
                       lambda: {"head": None, "bias": nn.Parameter(torch.ones(WORDS))}),
    "tied and scaled": (lambda m, h, y: ce(tied(m, h) * WIDTH ** -0.5, y), lambda: {"head": None}),
    "tied, shifted, capped": (lambda m, h, y: shifted(cap(tied(m, h)), y), lambda: {"head": None}),
    "norm before": (lambda m, h, y: ce(m.head(F.layer_norm(h, (WIDTH,))), y), dict),
    "dense before": (lambda m, h, y: ce(m.head(m.norm(F.gelu(m.dense(h)))), y),
                     lambda: {"dense": L(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "head": L(WIDTH, WORDS)}),
    "two heads": (lambda m, h, y: ce(m.head(h), y) + 0.5 * ce(m.other(h), y), lambda: {"other": L(WIDTH, WORDS)}),
    "two heads, one small": (lambda m, h, y: ce(m.head(h), y) + ce(m.other(h), y.clamp(-100, 2)),
                             lambda: {"other": L(WIDTH, 3)}),
    "two heads of tokens to come": (lambda m, h, y: ce(m.head(h), y) + ce(m.other(h)[:, :-1], y[:, 1:]),
                                    lambda: {"other": L(WIDTH, WORDS)}),
    "three heads": (lambda m, h, y: sum(ce(x(h), y) for x in (m.head, m.other, m.third)),
                    lambda: {"other": L(WIDTH, WORDS), "third": L(WIDTH, WORDS, bias=False)}),
    "heads averaged": (lambda m, h, y: ce((m.head(h) + m.other(h)) / 2, y), lambda: {"other": L(WIDTH, WORDS)}),
    "mixture of softmaxes": (lambda m, h, y: F.nll_loss(
        (0.3 * m.head(h).softmax(-1) + 0.7 * m.other(h).softmax(-1)).log().flatten(0, 1), y.flatten()),
        lambda: {"other": L(WIDTH, WORDS)}),
    "distilled": (lambda m, h, y: distilled(m.head(h).flatten(0, 1), teacher_logits(m, h).flatten(0, 1)),
                  lambda: {"teacher": L(WIDTH, WORDS)}),
    "distilled and labels": (lambda m, h, y: (lambda x: 0.5 * ce(x, y) + distilled(x, teacher_logits(m, h)))(m.head(h)),
                             lambda: {"teacher": L(WIDTH, WORDS)}),
    "teacher's logits given": (lambda m, h, y: distilled(m.head(h), m.given),
                               lambda: {"given": torch.randn(ROWS, TOKENS, WORDS)}),
    "mean squares to a teacher": (lambda m, h, y: F.mse_loss(m.head(h), m.given),
                                  lambda: {"given": torch.randn(ROWS, TOKENS, WORDS)}),
    "huber to a teacher": (lambda m, h, y: F.smooth_l1_loss(m.head(h), m.given),
                           lambda: {"given": torch.randn(ROWS, TOKENS, WORDS)}),
    "soft labels": (lambda m, h, y: ce_soft(m.head(h), one_hot(y)), dict),
    "masked language model": (lambda m, h, y: ce(m.head(h), torch.where(y % 3 == 0, y, -100)),
                              lambda: {"head": L(WIDTH, WORDS)}),
    "one token of each row": (lambda m, h, y: F.cross_entropy(m.head(h[:, 0]), y[:, 4].clamp(min=0)), dict),
    "token classes": (lambda m, h, y: ce(m.head(h), y), lambda: {"head": L(WIDTH, WORDS)}),
    "many labels": (lambda m, h, y: F.binary_cross_entropy_with_logits(m.head(h), one_hot(y)), dict),
    "many labels, weighted": (lambda m, h, y: F.binary_cross_entropy_with_logits(m.head(h), one_hot(y), pos_weight=m.weights),
                              lambda: {"weights": weights()}),
    "log-likelihood": (lambda m, h, y: F.nll_loss(m.head(h).log_softmax(-1).flatten(0, 1), y.flatten()), dict),
    "by hand": (lambda m, h, y: by_hand(m.head(h), y), dict),
    "by logsumexp": (lambda m, h, y: by_logsumexp(m.head(h), y), dict),
    "focal": (lambda m, h, y: focal(m.head(h), y), dict),
    "token weights": (lambda m, h, y: (per_token(m.head(h), y) * m.importance).sum() / m.importance.sum(),
                      lambda: {"importance": torch.linspace(0.0, 1.0, ROWS * TOKENS)}),
    "rows then mean": (lambda m, h, y: (per_token(m.head(h), y).view(ROWS, TOKENS).sum(1) / (
        (y >= 0).sum(1).clamp(min=1))).mean(), dict),
    "hinge": (lambda m, h, y: F.multi_margin_loss(m.head(h).flatten(0, 1), y.clamp(min=0).flatten()), dict),
    "entropy bonus": (lambda m, h, y: (lambda p: F.nll_loss(p.flatten(0, 1), y.flatten()) + 0.1 * (p.exp() * p).sum(-1).mean())(
        m.head(h).log_softmax(-1)), dict),
    "policy gradient": (lambda m, h, y: -(m.head(h).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
                                          * m.advantage).mean(), lambda: {"advantage": torch.linspace(-1, 1, TOKENS)}),
    "penalty of the hidden state": (lambda m, h, y: ce(m.head(h), y) + 0.1 * h.pow(2).mean(), dict),
    "segmentation": (lambda m, h, y: pixels(m, h, y, lambda m, x, z: F.cross_entropy(m.conv(x), z)),
                     lambda: {"head": None, "conv": nn.Conv2d(WIDTH, WORDS, 1)}),
    "segmentation, upsampled": (lambda m, h, y: pixels(m, h, y, lambda m, x, z: F.cross_entropy(upsampled(m.conv(x)), upsampled(
        z[:, None].double())[:, 0].long())),
        lambda: {"head": None, "conv": nn.Conv2d(WIDTH, WORDS, 3, padding=1)}),
    "with predictions": (lambda m, h, y: (lambda x: (ce(x, y), x.argmax(-1)))(m.head(h)), dict),
    "with losses of tokens": (lambda m, h, y: (lambda x: (x.sum() / 7, x.detach()))(per_token(m.head(h), y)), dict),
}


def ce_soft(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(0, -2))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    loss, parts = HEADS[name]
    return Headed(loss, **parts()).double()
