"""Small models of many families, each with a batch: where the operators that rules must cover come from.

`MODELS[name]()` gives `(model, batch)` for `tests.passes.traced.joint_graph`. Every model returns something with a loss
or a tensor to train on; nothing is downloaded.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any]]


def ids(*shape: int, vocab: int = 64) -> torch.Tensor:
    return torch.randint(0, vocab, shape)


def gpt2() -> Built:
    config = T.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1)
    return T.GPT2LMHeadModel(config), dict(input_ids=ids(2, 8), labels=ids(2, 8))


def llama() -> Built:
    config = T.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                           num_key_value_heads=2, vocab_size=64, max_position_embeddings=32)
    return T.LlamaForCausalLM(config), dict(input_ids=ids(2, 8), labels=ids(2, 8), use_cache=False)


def mistral_sliding_window() -> Built:
    config = T.MistralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, sliding_window=4)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return T.MistralForCausalLM(config), dict(input_ids=ids(2, 8), labels=ids(2, 8), attention_mask=mask, use_cache=False)


def bert() -> Built:
    config = T.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=64)
    return T.BertForSequenceClassification(config), dict(
        input_ids=ids(2, 8), labels=ids(2, vocab=2), attention_mask=torch.ones(2, 8).long()
    )


def t5() -> Built:
    config = T.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    return T.T5ForConditionalGeneration(config), dict(input_ids=ids(2, 8), labels=ids(2, 4), use_cache=False)


def vit() -> Built:
    config = T.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16,
                         patch_size=8, num_labels=4)
    return T.ViTForImageClassification(config), dict(pixel_values=torch.randn(2, 3, 16, 16), labels=ids(2, vocab=4))


def swin() -> Built:
    config = T.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    config.num_labels = 4
    return T.SwinForImageClassification(config), dict(pixel_values=torch.randn(2, 3, 32, 32), labels=ids(2, vocab=4))


def mixtral() -> Built:
    config = T.MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=64, num_local_experts=4, max_position_embeddings=32)
    return T.MixtralForCausalLM(config), dict(input_ids=ids(2, 8), labels=ids(2, 8), use_cache=False)


def whisper() -> Built:
    config = T.WhisperConfig(vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1,
                             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                             max_source_positions=16, max_target_positions=16, decoder_start_token_id=1, pad_token_id=0,
                             bos_token_id=1, eos_token_id=2)
    return T.WhisperForConditionalGeneration(config), dict(
        input_features=torch.randn(2, 8, 32), labels=ids(2, 8), use_cache=False
    )


class ConvNet(nn.Module):
    """Residual blocks with BatchNorm, max pooling and global average pooling."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, 3, padding=1, groups=2), nn.BatchNorm2d(width))
            for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def convnet() -> Built:
    return ConvNet(), dict(x=torch.randn(2, 3, 32, 32), labels=ids(2, vocab=4))


class EfficientNet(nn.Module):
    """Inverted bottleneck: expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, width: int = 8, expand: int = 4):
        super().__init__()
        inner = width * expand
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.depthwise = nn.Sequential(nn.Conv2d(inner, inner, 5, padding=2, groups=inner, bias=False),
                                       nn.BatchNorm2d(inner), nn.SiLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, width, 1), nn.SiLU(),
                                     nn.Conv2d(width, inner, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.Dropout(0.2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.depthwise(self.expand(x))
        x = x + self.project(y * self.squeeze(y))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def efficientnet() -> Built:
    return EfficientNet(), dict(x=torch.randn(2, 3, 16, 16), labels=ids(2, vocab=4))


class UNet(nn.Module):
    """Down and up again, with skip connections, group norm, and three ways of upsampling."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(3))
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.merge = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1, padding_mode="reflect") for _ in range(3))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for conv, norm in zip(self.down, self.norms):
            skips.append(x)
            x = F.silu(norm(conv(x)))
        ups: list[Callable] = [
            self.up, lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        ]
        for up, merge in zip(ups, self.merge):
            x = F.silu(merge(torch.cat([up(x), skips.pop()], 1)))
        return F.cross_entropy(self.head(F.pad(x, (1, 1))), F.pad(labels, (1, 1)))


def unet() -> Built:
    return UNet(), dict(x=torch.randn(2, 3, 16, 16), labels=ids(2, 16, 16, vocab=2))


class SpeechNet(nn.Module):
    """wav2vec-like: strided 1d convolutions over a waveform, convolutional positions, then an encoder layer."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(1, width, 10, 5), nn.Conv1d(width, width, 3, 2)])
        self.norms = nn.ModuleList([nn.GroupNorm(width, width), nn.LayerNorm(width)])
        self.positions = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 4, padding=2, groups=4), dim=2)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, wave: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norms[0](self.convs[0](wave[:, None])))
        x = F.gelu(self.norms[1](self.convs[1](x).transpose(1, 2)))
        x = x + F.gelu(self.positions(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), labels)


def speech() -> Built:
    return SpeechNet(), dict(wave=torch.randn(2, 165), labels=ids(2, vocab=4))


class Scan(nn.Module):
    """A linear recurrence by cumulative sums of logs, gated, with rotary positions on interleaved pairs."""

    def __init__(self, width: int = 16, vocab: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        value, gate, decay = self.mix(x).chunk(3, -1)
        even, odd = value[..., ::2], value[..., 1::2]
        position = torch.arange(value.shape[1], device=value.device)[None, :, None] / 10.0
        value = torch.stack((even * position.cos() - odd * position.sin(), even * position.sin() + odd * position.cos()),
                            -1).flatten(-2)
        log = F.logsigmoid(decay).cumsum(1)
        state = torch.exp(log) * torch.cumsum(value * torch.exp(-log), 1)
        x = x + state * torch.sigmoid(gate)
        shift = torch.roll(x, 1, 1) + x.flip(1)
        return F.cross_entropy(self.head(F.rms_norm(x + shift, x.shape[-1:])).flatten(0, 1), labels.flatten())


def scan() -> Built:
    return Scan(), dict(input_ids=ids(2, 8), labels=ids(2, 8))


class DLRM(nn.Module):
    """Tables and dense features meet in pairwise dot products."""

    def __init__(self, tables: int = 3, rows: int = 32, width: int = 8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bags = nn.EmbeddingBag(rows, width, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        count = tables + 2
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(width + count * (count - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, bags: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = [x, *(table(sparse[:, i]) for i, table in enumerate(self.tables)), self.bags(bags)]
        stacked = torch.stack(rows, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        flat = products[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat((x, flat), 1)).squeeze(1), labels)


def dlrm() -> Built:
    return DLRM(), dict(dense=torch.randn(4, 13), sparse=ids(4, 3, vocab=32), bags=ids(4, 5, vocab=32),
                        labels=torch.rand(4))


class GraphNet(nn.Module):
    """Messages along edges: gather by source, scatter_add and index_add by target, top-k pooling."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source, target = edges
        message = F.leaky_relu(self.message(torch.cat((x[source], x.index_select(0, target)), -1)))
        total = torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(message), message)
        total = total.index_add(0, target, message.tanh())
        peak = torch.full_like(x, -1e9).scatter_reduce(0, target[:, None].expand_as(message), message, "amax")
        x = self.update(total + peak.clamp(min=-1), x)
        score, kept = x.norm(dim=-1).topk(4)
        return F.cross_entropy(self.head(x[kept] * score[:, None]), labels)


def graphnet() -> Built:
    return GraphNet(), dict(x=torch.randn(8, 8), edges=ids(2, 16, vocab=8), labels=ids(4, vocab=4))


class Spectral(nn.Module):
    """Fourier mixing of tokens, complex rotary, cosine attention with a learned scale, label smoothing."""

    def __init__(self, width: int = 16, vocab: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.filter = nn.Parameter(torch.randn(width, 2))
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = x + torch.fft.fft2(x).real
        x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter), n=x.shape[1], dim=1)
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        angle = torch.outer(torch.arange(x.shape[1]).float(), torch.arange(x.shape[2] // 2).float())
        x = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return F.cross_entropy(self.head(F.normalize(x, dim=-1)).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def spectral() -> Built:
    return Spectral(), dict(input_ids=ids(2, 8), labels=ids(2, 8))


class Diffusion(nn.Module):
    """Denoising of noise drawn in the model: timestep embedding, adaptive norm, patches folded in and out of an image."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.time = nn.Linear(16, 2 * width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 48)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(image)
        t = torch.rand(image.shape[0], dtype=image.dtype)
        noisy = image * (1 - t.view(-1, 1, 1, 1)) + noise * t.view(-1, 1, 1, 1)
        frequencies = torch.exp(-torch.arange(8, dtype=image.dtype))
        angle = t[:, None] * frequencies
        shift, scale = self.time(torch.cat((angle.sin(), angle.cos()), -1)).chunk(2, -1)
        x = self.patch(noisy).flatten(2).transpose(1, 2)
        x = F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]
        x = x + self.attend(x, x, x, need_weights=False)[0]
        predicted = F.fold(self.out(x).transpose(1, 2), (16, 16), 4, stride=4)
        return F.mse_loss(predicted, noise) + F.smooth_l1_loss(F.unfold(predicted, 2, stride=2), F.unfold(noise, 2, stride=2))


def diffusion() -> Built:
    return Diffusion(), dict(image=torch.randn(2, 3, 16, 16))


class Losses(nn.Module):
    """Odds and ends of training code: losses, masks, statistics, conditionals on tensors."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.conv3 = nn.Conv3d(1, 2, 3, padding=1)
        self.bilinear = nn.Bilinear(width, width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        a, b = self.lin(x), self.lin(y)
        image = self.conv3(a.view(-1, 1, 4, 2, 2))
        image = F.avg_pool3d(F.max_pool3d(F.pad(image, (1, 1, 1, 1)), (1, 2, 2)), (2, 1, 1))
        loss = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean") + F.huber_loss(a, b)
        loss = loss + F.cosine_similarity(a, b).mean() + F.pairwise_distance(a, b).sum() + torch.cdist(a, b).mean()
        loss = loss + F.triplet_margin_loss(a, b, a.roll(1, 0)) + F.multi_margin_loss(self.bilinear(a, b), labels)
        loss = loss + torch.where(a > 0, a, torch.zeros_like(a)).masked_fill(b.isnan(), 0).prod(-1).mean()
        loss = loss + a.std() + a.var(0).sum() + a.max(-1).values.sum() + a.min() + a.median(-1).values.sum()
        loss = loss + torch.einsum("ik,jk->ij", a, b).triu().sum() + torch.logsumexp(a, -1).sum() + a.cumprod(-1).sum()
        loss = loss + a.sort(-1).values[:, ::2].sum() + a.diagonal().sum() + torch.outer(a[0], b[0]).tril(-1).sum()
        loss = loss + F.one_hot(labels, 4).to(a.dtype).matmul(torch.ones(4, 1, dtype=a.dtype)).sum()
        loss = loss + a.repeat(2, 1).unfold(0, 2, 2).sum()
        loss = loss + a.argmax(-1).to(a.dtype).mean() * 0 + (a > 0).any().to(a.dtype) * 0
        loss = loss + torch.linspace(0, 1, 16).mul(a).sum()
        loss = loss + a.repeat_interleave(2, 0).sum() + torch.tril(torch.ones(4, 4)).bool().to(a.dtype).mm(a[:4]).sum()
        return loss + image.mean() + F.glu(a).sum() + F.prelu(a, self.lin.bias[:1]).sum() + a.logcumsumexp(0).sum()


def losses() -> Built:
    return Losses(), dict(x=torch.randn(4, 16), y=torch.randn(4, 16), labels=ids(4, vocab=4))


MODELS: dict[str, Callable[[], Built]] = {
    f.__name__: f for f in (
        gpt2, llama, mistral_sliding_window, bert, t5, vit, swin, mixtral, whisper, convnet, efficientnet, unet, speech,
        scan, dlrm, graphnet, spectral, diffusion, losses,
    )
}
