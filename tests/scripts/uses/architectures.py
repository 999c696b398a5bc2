"""Models as people write them, a few steps each."""
from __future__ import annotations

import math

import torch
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
def bags_of_embeddings(hp):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(16, 8, mode="mean"), nn.Linear(8, 4)

        def forward(self, ids, offsets):
            return self.head(self.bag(ids, offsets))

    return _trained(hp, Bags(), tokens().flatten(), torch.tensor([0, 5, 11, 16]))


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
