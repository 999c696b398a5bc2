"""Models as people write them, a few steps each."""
from __future__ import annotations

import math

import torch
from packaging.version import Version
from torch import nn
from torch.nn import functional as F

from tests.scripts.models import adamw, classes, inputs, mlp, sgd, targets, tokens, train
from tests.scripts.use import use


def _trained(hp, model, *args, loss=lambda out: out.square().mean(), steps=2):
    """Steps of a model whose arguments are not rows alone."""
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(call(*args))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model, optimizer


def _images(rows=4, channels=3, side=8):
    return inputs(rows, channels * side * side).view(rows, channels, side, side)


@use
def wide_and_deep(hp):
    class WideAndDeep(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.deep = nn.Linear(16, 4), mlp()

        def forward(self, x):
            return self.wide(x.sign()) + self.deep(x)

    return train(hp, WideAndDeep())


@use
def residual_mlp_with_layer_norm(hp):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    return train(hp, nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 4)))


@use
def swiglu_with_rms_norm(hp):
    class SwiGLU(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gate_up, self.down = nn.RMSNorm(16), nn.Linear(16, 64, bias=False), nn.Linear(32, 16, bias=False)

        def forward(self, x):
            gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    return train(hp, nn.Sequential(SwiGLU(), SwiGLU(), nn.Linear(16, 4)))


@use
def mixer(hp):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.across, self.along, self.norm = nn.Linear(6, 6), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            x = x + self.across(self.norm(x).transpose(1, 2)).transpose(1, 2)
            return x + self.along(self.norm(x))

    return _trained(hp, Mixer(), inputs(4, 48).view(4, 6, 8))


@use
def convolutions(hp):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2, padding=1),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return _trained(hp, model, _images(), loss=lambda out: F.cross_entropy(out, classes(4)))


@use
def resnet_with_batch_norm(hp):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.norm_a, self.norm_b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x):
            return torch.tanh(x + self.norm_b(self.b(torch.tanh(self.norm_a(self.a(x))))))

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Residual(), nn.Flatten(), nn.Linear(512, 4))
    seen = _trained(hp, model, _images(), loss=lambda out: F.cross_entropy(out, classes(4)))
    model.eval()
    with torch.no_grad():
        return seen, hp.compile(model)(_images())


@use
def norms_of_all_kinds(hp):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1),
                          nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Tanh(),
                          nn.LocalResponseNorm(2), nn.Flatten(), nn.Linear(512, 4))
    return _trained(hp, model, _images())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        high = F.silu(self.down(x))
        return self.out(torch.cat([high, self.up(F.silu(self.deep(high)))], 1))


@use
def u_net(hp):
    return _trained(hp, UNet(), _images(), loss=lambda out: F.mse_loss(out, _images().flip(0)))


@use
def depthwise_and_dilated(hp):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.Conv2d(6, 6, 3, padding=1, groups=6),
                          nn.PixelShuffle(1), nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.Conv2d(6, 2, 1))
    return _trained(hp, model, _images())


@use
def temporal_convolutions(hp):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv1d(4, 4, 2, dilation=2 ** i) for i in range(3)])

        def forward(self, x):
            for i, conv in enumerate(self.convs):
                x = x + torch.tanh(conv(F.pad(x, (2 ** i, 0))))
            return x

    return _trained(hp, Causal(), inputs(4, 32).view(4, 4, 8))


@use
def patches_and_attention(hp):
    """ViT: patches, a class token, learned positions."""
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 4, stride=4)
            self.cls, self.place = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
            self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.place
            return self.head(self.block(x)[:, 0])

    return _trained(hp, ViT(), _images(), loss=lambda out: F.cross_entropy(out, classes(4)))


class GPT(nn.Module):
    def __init__(self, heads=2, groups=2, rotary=False):
        super().__init__()
        self.heads, self.groups, self.rotary = heads, groups, rotary
        self.embed, self.norm = nn.Embedding(16, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 16 + 2 * 16 // heads * groups), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, ids):
        x = self.embed(ids)
        rows, length, _ = x.shape
        size = 16 // self.heads
        q, k, v = self.qkv(self.norm(x)).split([16, size * self.groups, size * self.groups], -1)
        q, k, v = (t.view(rows, length, -1, size).transpose(1, 2) for t in (q, k, v))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        x = x + self.out(h.transpose(1, 2).reshape(rows, length, 16))
        return self.head(x + self.down(F.gelu(self.up(x))))


def rotated(x):
    size = x.shape[-1]
    angles = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(size // 2) * 2 / size)
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1).flatten(-2)


def _next_token(out):
    return F.cross_entropy(out[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


@use
def gpt(hp):
    return _trained(hp, GPT(), tokens(), loss=_next_token)


@use
def grouped_queries_and_rotary(hp):
    return _trained(hp, GPT(heads=4, groups=2, rotary=True), tokens(), loss=_next_token)


@use
def attention_written_out(hp):
    """With a mask for padding, a bias for distances (ALiBi), and weights that are looked at."""
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, padding):
            length = x.shape[1]
            places = torch.arange(length)
            scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(8) - 0.1 * (places[:, None] - places).abs()
            scores = scores.masked_fill(padding[:, None, :], float("-inf"))
            weights = scores.softmax(-1)
            return weights @ self.v(x), weights

    padding = torch.arange(6).expand(4, 6) >= torch.tensor([6, 4, 5, 3])[:, None]
    return _trained(hp, Attends(), inputs(4, 48).view(4, 6, 8), padding,
                    loss=lambda out: out[0].square().mean() - 0.1 * (out[1] * (out[1] + 1e-9).log()).sum())


@use
def multihead_attention(hp):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x, memory):
            out, weights = self.attention(x, memory, memory)
            return out.square().mean() + weights.square().mean()

    return _trained(hp, Attends(), inputs(4, 96).view(4, 6, 16), inputs(4, 80).view(4, 5, 16), loss=lambda out: out)


@use
def encoder_and_decoder(hp):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 16)
            self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 16)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            out = self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
            return self.head(out)

    return _trained(hp, Translator(), tokens(4, 5), tokens(), loss=_next_token)


@use
def linear_attention(hp):
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            states = torch.einsum("bld,ble->blde", k, v).cumsum(1)
            return torch.einsum("bld,blde->ble", q, states) / (q * k.cumsum(1)).sum(-1, keepdim=True)

    return _trained(hp, Linear(), inputs(4, 48).view(4, 6, 8))


@use(tolerance=1e-4)  # float32 is all that it computes in on CPUs, and forward all that it does there in eager
def flexible_attention(hp):
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 4)

        def forward(self, x):
            with torch.no_grad():
                q, k, v = (t.view(2, 16, 1, 16).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
                h = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))
            return self.head(h)

    return _trained(hp, Flexible().float(), inputs(2, 256).view(2, 16, 16).float())


@use(refused={"parts": "backward has a gradient for another output than the loss"})
def experts_chosen_by_a_mask(hp):
    """Every expert on every token, weighted by the gate's best two."""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x):
            scores = self.gate(x).softmax(-1)
            best, which = scores.topk(2, -1)
            gates = torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))
            outs = torch.stack([expert(x) for expert in self.experts], -1)
            balance = scores.mean(0) * F.one_hot(which[:, 0], 4).double().mean(0)
            return (outs * gates[:, None, :]).sum(-1), balance.sum()

    return _trained(hp, Experts(), inputs(), loss=lambda out: out[0].square().mean() + 0.1 * out[1])


@use(compiles=False)  # rows are chosen in a loop: Dynamo breaks there, and leaves such a function alone
def experts_with_tokens_gathered(hp):
    """As in Mixtral: each expert takes the tokens that chose it, and adds to the result."""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

        def forward(self, x):
            best, which = self.gate(x).softmax(-1).topk(2, -1)
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                row, slot = torch.where(which == number)
                result.index_add_(0, row, expert(x[row]) * best[row, slot, None])
            return result

    return _trained(hp, Experts(), inputs())


@use
def experts_in_one_tensor(hp):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 8) / 4)
            self.down = nn.Parameter(torch.randn(4, 8, 16) / 4)

        def forward(self, x):
            scores = self.gate(x).softmax(-1)
            hidden = torch.einsum("bi,eij->bej", x, self.up).relu()
            return torch.einsum("bej,eji,be->bi", hidden, self.down, scores)

    return _trained(hp, Experts(), inputs())


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        state = None
        for k in range(3):
            state = self.cell(x.roll(k, 1), state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@use
def recurrent_cells(hp):
    return [train(hp, Recurrent(cell), steps=2) for cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)]


@use
def selective_scan(hp):
    """A state space model's recurrence, written as a loop."""
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.step = nn.Parameter(torch.rand(8, 4)), nn.Linear(8, 8)
            self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            step, b, c = F.softplus(self.step(x)), self.b(x), self.c(x)
            state, outs = x.new_zeros(len(x), 8, 4), []
            for t in range(x.shape[1]):
                state = state * torch.exp(-step[:, t, :, None] * self.decay) + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
                outs.append((state * c[:, t, None]).sum(-1))
            return torch.stack(outs, 1)

    return _trained(hp, Scan(), inputs(4, 32).view(4, 4, 8))


@use
def message_passing(hp):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x, edges):
            source, target = edges
            messages = self.message(torch.cat([x[source], x[target]], -1)).relu()
            gathered = torch.zeros_like(x).index_add_(0, target, messages)
            degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target))).clamp(min=1)
            return self.update(torch.cat([x, gathered / degree[:, None]], -1))

    edges = torch.stack([torch.arange(20) % 8, torch.arange(20) * 3 % 8])
    return _trained(hp, Graph(), inputs(), edges)


@use
def graph_attention_by_scatter(hp):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.score = nn.Linear(16, 16), nn.Linear(32, 1)

        def forward(self, x, source, target):
            h = self.net(x)
            score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1))).squeeze(-1)
            top = torch.full((8,), -1e9).scatter_reduce(0, target, score, "amax")
            weight = (score - top[target]).exp()
            total = torch.zeros(8).scatter_add(0, target, weight)
            messages = h[source] * (weight / total[target])[:, None]
            return torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, 16), messages)

    return _trained(hp, Graph(), inputs(), torch.arange(20) % 8, torch.arange(20) * 3 % 8)


@use
def adjacency_as_a_matrix(hp):
    adjacency = ((torch.arange(64) * 5 % 7) < 2).view(8, 8).double() + torch.eye(8)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
            self.register_buffer("adjacency", adjacency / adjacency.sum(1, keepdim=True))

        def forward(self, x):
            return self.adjacency @ self.b((self.adjacency @ self.a(x)).relu())

    return train(hp, Graph())


@use
def bags_of_embeddings(hp):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(16, 8, mode="mean"), nn.Linear(8, 4)

        def forward(self, ids, offsets):
            return self.head(self.bag(ids, offsets))

    return _trained(hp, Bags(), tokens().flatten(), torch.tensor([0, 5, 11, 16]))


@use
def recommender(hp):
    """DLRM: tables, a bottom network, products of all pairs, a top network."""
    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(16, 8) for _ in range(3)])
            self.bottom, self.top = nn.Linear(16, 8), nn.Linear(8 + 6, 1)

        def forward(self, dense, ids):
            parts = torch.stack([self.bottom(dense).relu(), *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
            row, column = torch.tril_indices(4, 4, -1)
            products = torch.bmm(parts, parts.transpose(1, 2))[:, row, column]
            return self.top(torch.cat([parts[:, 0], products], 1)).squeeze(1)

    return _trained(hp, DLRM(), inputs(), tokens(8, 3),
                    loss=lambda out: F.binary_cross_entropy_with_logits(out, (classes() % 2).double()))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return F.mse_loss(self.decode(z), x) - 0.01 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()


@use
def variational_autoencoder(hp):
    """The same random numbers as on one device."""
    return _trained(hp, Autoencoder(), inputs(), loss=lambda out: out)


@use
def noise_from_outside(hp):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

        def forward(self, x, noise):
            mean, log_var = self.encode(x).chunk(2, -1)
            return F.mse_loss(self.decode(mean + noise * (log_var / 2).exp()), x)

    model = Decoder()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(inputs(), torch.randn(8, 4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use
def diffusion(hp):
    model = UNet()
    call, optimizer, losses = hp.compile(model), adamw(model), []
    kept = torch.linspace(0.99, 0.1, 10)
    for _ in range(2):
        at = torch.randint(10, (4,))
        noise = torch.randn(4, 3, 8, 8)
        scale = kept[at][:, None, None, None]
        loss = F.mse_loss(call(scale.sqrt() * _images() + (1 - scale).sqrt() * noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        x = torch.randn(4, 3, 8, 8)
        for _ in range(3):
            x = x - 0.1 * call(x)
    return losses, x, model


@use
def contrastive(hp):
    """CLIP: a matrix of similarities between all rows, both ways, a learned temperature."""
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.scale = nn.Linear(16, 8), nn.Linear(4, 8), nn.Parameter(torch.tensor(1.0))

        def forward(self, x, y):
            one, two = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
            logits = one @ two.t() * self.scale.exp()
            labels = torch.arange(len(x))
            return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    return _trained(hp, Clip(), inputs(), targets(), loss=lambda out: out)


@use
def supervised_contrastive(hp):
    class SimCLR(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(outs=8)

        def forward(self, x, labels):
            z = F.normalize(self.net(torch.cat([x, x.flip(1)])), dim=-1)
            labels = labels.repeat(2)
            scores = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
            same = (labels[:, None] == labels) & ~torch.eye(len(z), dtype=torch.bool)
            return -(scores.log_softmax(-1) * same).sum(1).div(same.sum(1)).mean()

    return _trained(hp, SimCLR(), inputs(), classes(), loss=lambda out: out)


@use
def redundancy_reduction(hp):
    """Barlow twins and VICReg: a matrix of correlations over the batch."""
    class Barlow(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(outs=8)

        def forward(self, x):
            one, two = self.net(x), self.net(x.flip(1))
            one, two = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (one, two))
            cross = one.t() @ two / len(x)
            return (cross.diagonal() - 1).square().sum() + 0.01 * (cross - cross.diagonal().diag()).square().sum()

    return _trained(hp, Barlow(), inputs(), loss=lambda out: out)


@use
def connectionist_temporal_classification(hp):
    model = nn.Linear(8, 5)
    call, optimizer, losses = hp.compile(model), sgd(model), []
    x, lengths = inputs(4, 80).view(4, 10, 8), torch.tensor([10, 9, 8, 10])
    for _ in range(2):
        optimizer.zero_grad()
        scores = call(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, tokens(4, 3, 4) + 1, lengths, torch.tensor([3, 2, 3, 1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


@use
def sequence_to_sequence_with_teacher_forcing(hp):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(16, 16), nn.GRUCell(16, 16), nn.Linear(16, 16)

        def forward(self, ids, forced):
            state = x = self.embed(ids[:, 0])
            outs = []
            for t in range(ids.shape[1] - 1):
                state = self.cell(x, state)
                outs.append(self.head(state))
                x = self.embed(ids[:, t + 1] if forced else outs[-1].argmax(-1))
            return torch.stack(outs, 1)

    model = Decoder()
    call, optimizer, losses = hp.compile(model), sgd(model), []
    for forced in (True, False):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(tokens(), forced).flatten(0, 1), tokens()[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@use
def splines(hp):
    """KAN: each edge a curve of its own, on a grid that is a buffer."""
    class KAN(nn.Module):
        def __init__(self, width, outs):
            super().__init__()
            self.register_buffer("grid", torch.linspace(-1, 1, 5))
            self.curves, self.base = nn.Parameter(torch.randn(outs, width, 5) / 8), nn.Linear(width, outs)

        def forward(self, x):
            bumps = torch.exp(-(x[..., None] - self.grid).square() * 8)
            return torch.einsum("big,oig->bo", bumps, self.curves) + self.base(F.silu(x))

    return train(hp, nn.Sequential(KAN(16, 8), nn.Tanh(), KAN(8, 4)))


@use
def fourier_layers(hp):
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 2) / 4)
            self.out = nn.Linear(16, 4)

        def forward(self, x):
            spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.weight)
            return self.out(torch.fft.irfft(spectrum, n=16) + x)

    return train(hp, Fourier())


@use
def complex_weights(hp):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex128) / 4)

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight).abs()

    return train(hp, Complex(), optimizer=None, steps=2)


@use
def physics_informed(hp):
    """The loss is a differential equation: derivatives of the output by the input, in the model."""
    class Solves(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, t):
            value, slope = torch.func.jvp(self.net, (t,), (torch.ones_like(t),))
            return (slope + value).square().mean() + (self.net(torch.zeros(1, 1)) - 1).square().mean()

    return _trained(hp, Solves(), inputs(8, 1), loss=lambda out: out)


@use
def neural_differential_equation(hp):
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

        def forward(self, x):
            for _ in range(3):
                half = x + 0.05 * self.field(x)
                x = x + 0.1 * self.field(half)
            return x

    return train(hp, Field(), y=targets(8, 16))


@use
def normalizing_flow(hp):
    class Coupling(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList([nn.Linear(8, 16) for _ in range(2)])

        def forward(self, x):
            logs = x.new_zeros(len(x))
            for net in self.nets:
                kept, changed = x.chunk(2, 1)
                shift, scale = net(kept).chunk(2, 1)
                x = torch.cat([changed * scale.tanh().exp() + shift, kept], 1)
                logs = logs + scale.tanh().sum(1)
            return (x.square().sum(1) / 2 - logs).mean()

    return _trained(hp, Coupling(), inputs(), loss=lambda out: out)


@use
def vector_quantization(hp):
    class VQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.codes, self.decode = nn.Linear(16, 4), nn.Embedding(8, 4), nn.Linear(4, 16)

        def forward(self, x):
            z = self.encode(x)
            near = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            loss = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(z, near.detach())
            return F.mse_loss(self.decode(z + (near - z).detach()), x) + loss

    return _trained(hp, VQ(), inputs(), loss=lambda out: out)


@use
def mixture_density(hp):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(16, 12)

        def forward(self, x, y):
            logits, mean, log_std = self.net(x).view(-1, 3, 4).unbind(1)
            parts = torch.distributions.Normal(mean, log_std.exp()).log_prob(y) + logits.log_softmax(-1)
            return -parts.logsumexp(-1).mean()

    return _trained(hp, Mixture(), inputs(), targets()[:, :1], loss=lambda out: out)


@use
def conditional_random_field(hp):
    class CRF(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.moves = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x, tags):
            scores = self.net(x)
            alpha = scores[:, 0]
            for t in range(1, x.shape[1]):
                alpha = torch.logsumexp(alpha[:, :, None] + self.moves, 1) + scores[:, t]
            gold = scores.gather(2, tags[..., None]).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
            return (alpha.logsumexp(1) - gold).mean()

    return _trained(hp, CRF(), inputs(4, 40).view(4, 5, 8), tokens(4, 5, 4), loss=lambda out: out)


@use(compiles=Version(torch.__version__) >= Version("2.15"))
def recurrent_layers_left_to_dynamo(hp):
    """nn.LSTM, which Dynamo does not trace up to torch 2.14: the model is whole on every rank then."""
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 16)

        def forward(self, ids):
            return self.head(self.lstm(self.embed(ids))[0])

    return _trained(hp, Tagger(), tokens(), loss=_next_token)


@use
def deep_equilibrium(hp):
    class Implicit(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

        def forward(self, x):
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(5):
                    z = torch.tanh(0.3 * self.a(z) + self.b(x))
            return torch.tanh(0.3 * self.a(z) + self.b(x))

    return train(hp, Implicit(), y=targets(8, 16))
