"""Train a GPT whose parameters are several times the memory limit of each process, from safetensors; measure its peak memory.

    torchrun --nproc-per-node 4 benchmarks/host_memory.py --weights DIR --make     # initialize, and write the files
    torchrun --nproc-per-node 4 benchmarks/host_memory.py --weights DIR            # load and train within the limit
    python benchmarks/host_memory.py --weights DIR                                 # the same losses, on one device

The limit (RLIMIT_DATA: heap and private memory, by size) is a part of the parameters' bytes, 1 / --times, above what the
process has after two steps of a tiny model, which loads compilers and opens connections. Gradients are applied (SGD) and freed
in backward, as soon as their block is done: on four ranks they and the parameters would be half of the whole model. For this,
each block is compiled by itself. It saves its input alone for backward (recompute "full"), and its output is whole: the first
step would compile each block anew for sharded ones. Peaks are of resident memory (VmHWM), above the same base. Queries, keys
and values have one weight: the rows that 4 ranks load do not fit its view in 3 parts, so they are sharded again by heads.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpml_compiler
from hpml_compiler.runtime.process.world_group import ensure_process_group, from_all_ranks, this_rank, world_size

MIB = 2**20
ROWS, LENGTH, RATE = 4, 16, 0.05
MMAP_THRESHOLD = -3


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.norm, self.words = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.words(self.norm(x)).flatten(0, 1), labels.flatten())


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, vocab: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, width), Head(width, vocab)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x, labels)

    @property
    def parts(self) -> list[nn.Module]:
        return [self.tokens, *self.blocks, self.head]


def on_meta(width: int, layers: int, vocab: int) -> GPT:
    with torch.device("meta"):
        return GPT(width, layers, vocab)


def nbytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def kib(name: str) -> int:
    """A line of this process's status in the kernel."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


class Peaks:
    """Growth of resident memory by phase, at its peak, above that at the start."""

    def __init__(self) -> None:
        self.base, self.found = kib("VmRSS"), dict[str, int]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        yield
        self.found[name] = max(self.found.get(name, 0), (kib("VmHWM") - self.base) // 1024)


def compile_parts(model: GPT) -> None:
    ranks = world_size()
    for part in model.parts if ranks > 1 else ():
        part.compile(backend="hpml", options={"compiler": "eager", "mesh": {"dp": ranks}, "zero": 3, "recompute": "full",
                                              "outputs": "whole"})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_apply)


@torch.no_grad()
def _apply(parameter: torch.Tensor) -> None:
    """A step of SGD as soon as a gradient is there."""
    assert parameter.grad is not None
    parameter.add_(parameter.grad, alpha=-RATE)
    parameter.grad = None


def train(model: GPT, vocab: int, steps: int, peaks: Peaks) -> list[float]:
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(0, vocab, (ROWS, LENGTH + 1), generator=generator)
        with peaks.phase("forward"):
            loss = model(text[:, :-1], text[:, 1:])
        with peaks.phase("backward"):
            loss.backward()
        losses.append(round(loss.item(), 5))
        del loss
    return losses


def warm_up() -> None:
    model = hpml_compiler.initialize(on_meta(64, 2, 64))
    compile_parts(model)
    train(model, 64, 2, Peaks())
    hpml_compiler.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="folder of the files")
    parser.add_argument("--make", action="store_true", help="write the files")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--times", type=float, default=3.0, help="parameters' bytes, as a multiple of the limit; 0: no limit")
    chosen = parser.parse_args()
    ensure_process_group()
    torch.manual_seed(0)
    model = on_meta(chosen.width, chosen.layers, chosen.vocab)
    total, largest = nbytes(model), max(map(nbytes, model.parts))
    if chosen.make:
        hpml_compiler.save(hpml_compiler.initialize(model), chosen.weights)
        return
    if world_size() > 1:
        warm_up()
    peaks, begun = Peaks(), time.perf_counter()
    found: dict[str, Any] = {"parameters": total // MIB, "shard": total // MIB // world_size(),
                             "largest module": largest // MIB}
    if world_size() > 1 and chosen.times:
        found["limit"] = int(total / chosen.times / MIB)
        limit = kib("VmData") * 1024 + int(total / chosen.times)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with peaks.phase("load"):
        hpml_compiler.load(model, chosen.weights)
    compile_parts(model)
    found["losses"] = train(model, chosen.vocab, chosen.steps, peaks)
    found["peaks MiB"] = from_all_ranks(peaks.found)
    found["seconds"] = round(time.perf_counter() - begun, 1)
    if this_rank() == 0:
        print(json.dumps(found, indent=1))
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 65536)  # glibc's: freed tensors are given back to the system
    main()
