"""The models that are trained; `common.build` loads this file anew for every contender."""
from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Module):
    """Two wide layers; returns the loss, so that nothing else has to be gathered."""

    def __init__(self, width: int = 512, hidden: int = 2048, layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)}) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](nn.functional.gelu(layer["up"](x)))
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm1(x)
        q, k, v = (f(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small decoder that returns its loss."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 8, vocab: int = 2048, length: int = 128):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class BrokenGPT(GPT):
    """With a graph break in the middle: two graphs share a step."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = layer(x)
        torch._dynamo.graph_break()
        for layer in self.layers[half:]:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    """Convolutions down and up again, where each level up reads what its level down has made: skip connections."""

    def __init__(self, channels: int = 32, depth: int = 3, colors: int = 3):
        super().__init__()
        widths = [channels * 2**level for level in range(depth)]
        self.down = nn.ModuleList(self._level(before, after) for before, after in zip([colors, *widths], widths))
        self.middle = self._level(widths[-1], 2 * widths[-1])
        above = [2 * widths[-1], *widths[:0:-1]]
        self.up = nn.ModuleList(self._level(below + skip, skip) for below, skip in zip(above, widths[::-1]))
        self.head = nn.Conv2d(channels, colors, 1)

    @staticmethod
    def _level(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, skips = images, []
        for level in self.down:
            skips.append(level(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for level, skip in zip(self.up, skips[::-1]):
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return nn.functional.mse_loss(self.head(x), target)


GPTS = {  # width, layers, heads, vocabulary, sequence, batch
    "gpt": (256, 4, 8, 2048, 128, 8), "gpt_memory": (512, 6, 8, 8192, 512, 4), "gpt_memory_small": (64, 2, 4, 256, 32, 4),
    "gpt_4": (256, 4, 8, 4096, 256, 4), "gpt_2": (512, 2, 8, 2048, 128, 2), "logits": (64, 1, 4, 16384, 256, 8),
    "gpt_broken": (256, 4, 8, 4096, 256, 4), "gpt_broken_small": (64, 4, 4, 256, 32, 4),
}
UNETS = {"unet": (32, 3, 8, 96), "unet_small": (8, 2, 2, 16)}  # channels, depth, batch, pixels


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """name: "gpt@16" is "gpt" with 16 layers."""
    torch.manual_seed(0)
    name, _, layers = name.partition("@")
    if name == "mlp_wide":
        return MLP(1024, 4096, 2), (torch.randn(16, 1024),)
    if name == "mlp_batch":
        return MLP(128, 256, 3), (torch.randn(4096, 128),)
    if name in UNETS:
        channels, depth, batch, pixels = UNETS[name]
        images = torch.randn(batch, 3, pixels, pixels)
        return UNet(channels, depth), (images, images.flip(-1))
    *sizes, batch = GPTS[name]
    sizes[1] = int(layers or sizes[1])
    ids = torch.randint(0, sizes[3], (batch, sizes[4]))
    return (BrokenGPT if "broken" in name else GPT)(*sizes), (ids, ids.roll(-1, 1))
