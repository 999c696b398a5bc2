"""Several ranks: models whose script computes the loss, or that break the graph, against DDP. Step time and peak per rank.

    torchrun --nproc-per-node 2 benchmarks/outputs.py [--rounds 10] [--models language unet zoo:led ...]
        [--contenders ddp hpml hpml:1 ...] [--share]

Contenders train copies of one model on the same global batch, interleaved, one thread per rank: DDP compiled with inductor,
hpml, hpml:N, which computes the loss in N chunks, hpml_inside, the same model wrapped to compute its loss, and hpml_whole,
which gathers what graphs return. --share gives each rank as many rows as each of two ranks has without it. language, unet and
llama return logits, from which the script computes the loss; the others are Hugging Face's as published, which return it, some
after a graph break. zoo:NAME is an architecture of tests/zoo, tiny, with eight times its rows. Reports the median step of the
slowest rank, and the largest peak of allocations in a step over the ranks, above parameters and gradients; DDP's buckets,
which it holds all the time, are counted. recording_us is the time of a step in which hpml notes what the
script calls on outputs; gathered lists outputs that were gathered, and by what.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import median, report, turn
from heads import hugging_face, peak_above
from torch import nn
from two_ranks import slowest, timed

from hpml_compiler.runtime.outputs import record
from hpml_compiler.runtime.outputs.output_wrapper import OutputUses
from hpml_compiler.session import session
from passes.session_state import state_of

WORDS, CLASSES = 8192, 21


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, width), nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(),
                         nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.third = convolutions(3, width), convolutions(width, 2 * width), convolutions(
            2 * width, 4 * width)
        self.up, self.last = convolutions(6 * width, 2 * width), convolutions(3 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        one = self.first(input_ids)
        two = self.second(F.max_pool2d(one, 2))
        three = F.interpolate(self.third(F.max_pool2d(two, 2)), scale_factor=2.0)
        back = F.interpolate(self.up(torch.cat([three, two], 1)), scale_factor=2.0)
        return self.head(self.last(torch.cat([back, one], 1)))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


def text(words: int, rows: int = 8, length: int = 128, name: str = "input_ids") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, words, (rows, length))
    return {name: ids, "labels": ids.clone()}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(8, 3, 32, 32), "labels": torch.arange(8) % 2}


_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = hugging_face("Llama", vocab_size=WORDS, num_key_value_heads=4, **_TINY)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "language": (Language, lambda: text(WORDS)),
    "unet": (UNet, lambda: {"input_ids": torch.rand(4, 3, 64, 64), "labels": torch.randint(0, CLASSES, (4, 64, 64))}),
    "llama": (lambda: Logits(_LLAMA()), lambda: text(WORDS)),
    "gpt2": (hugging_face("GPT2", vocab_size=WORDS, n_embd=128, n_layer=2, n_head=4), lambda: text(WORDS)),
    "bert": (hugging_face("Bert", vocab_size=WORDS, **_TINY), lambda: text(WORDS)),
    "t5": (hugging_face("T5", vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4,
                        decoder_start_token_id=0),
           lambda: text(WORDS)),
    "mixtral": (hugging_face("Mixtral", vocab_size=WORDS, num_key_value_heads=4, num_local_experts=4, **_TINY),
                lambda: text(WORDS)),
    "vit": (hugging_face("ViT", image_size=32, patch_size=4, **_TINY), images),
}
OUTSIDE = ("language", "unet", "llama")
ZOO_ROWS = 8


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch."""
    kind, _, architecture = name.rpartition(":")
    if not kind:
        make, batch_of = MODELS[name]
        return make(), batch_of()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.zoo.models import pick

    model, batch = pick(architecture).make(torch.float32)
    return model, {key: x.repeat(ZOO_ROWS, *[1] * (x.dim() - 1)) for key, x in batch.items()}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.dim() == 3:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(input_ids), labels)


class Contender:
    """A compiled model, its optimizer and its batch. buckets: bytes that DDP holds besides parameters and gradients."""

    def __init__(self, name: str, kind: str, share: bool) -> None:
        torch.manual_seed(0)
        (model, self.batch), self.outside = made(name), name in OUTSIDE and kind != "hpml_inside"
        self.held, self.buckets = sum(2 * p.numel() * p.element_size() for p in model.parameters()), 0
        rank, world = dist.get_rank(), dist.get_world_size()
        if share:
            self.batch = {key: torch.cat([x] * world)[:x.size(0) * world // 2] for key, x in self.batch.items()}
        if kind == "ddp":
            self.batch = {key: x.chunk(world)[rank] for key, x in self.batch.items()}
            self.call = torch.compile(nn.parallel.DistributedDataParallel(model, find_unused_parameters=":" in name))
            self.buckets = self.held // 2
        else:
            session.reset()
            model = WithLoss(model) if name in OUTSIDE and kind == "hpml_inside" else model
            chunks = kind.partition(":")[2]
            options = {"outputs": "whole"} if kind == "hpml_whole" else {"loss_chunks": int(chunks)} if chunks else {}
            self.call = torch.compile(model, backend="hpml", options=options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self) -> Any:
        self.optimizer.zero_grad(set_to_none=False)
        if self.outside:
            loss = loss_of(self.call(self.batch["input_ids"]), self.batch["labels"])
        else:
            found = self.call(**self.batch)
            loss = found if isinstance(found, torch.Tensor) else found.loss
        loss.backward()
        self.optimizer.step()
        return loss


def recording_us(step: Callable[[], Any]) -> float:
    """Time of one step in `CallRecord.add`, without what it computes."""
    spent, add, compute = [0.0], record.CallRecord.add, record.CallRecord._values_of

    def measured(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[0] += sign * (time.perf_counter() - start)

        return call

    record.CallRecord.add, record.CallRecord._values_of = measured(add, 1), measured(compute, -1)
    try:
        step()
    finally:
        record.CallRecord.add, record.CallRecord._values_of = add, compute
    return 1e6 * spent[0]


def compare(name: str, kinds: list[str], rounds: int, share: bool) -> None:
    found: dict[str, Contender] = {}
    for kind in kinds:
        if kind != "hpml_inside" or name in OUTSIDE:
            found[kind] = Contender(name, kind, share)
            for _ in range(3):
                found[kind].step()
    times: dict[str, list[float]] = {kind: [] for kind in found}
    for k in range(rounds):
        for kind in (list(found) if k % 2 else list(found)[::-1]):
            times[kind] += turn(lambda kind=kind: timed(found[kind].step, time.perf_counter))
    peaks = {kind: round(slowest(peak_above(each.step, each.held) + each.buckets) / 2**20, 1) for kind, each in found.items()}
    spent = recording_us(found["hpml"].step) if "hpml" in found else 0.0
    gathered = [use.described() for use in state_of(OutputUses).values() if use.gathers]
    medians = {kind: round(1e3 * median(each), 1) for kind, each in times.items()}
    ratios = {kind: round(median([a / b for a, b in zip(each, times["ddp"], strict=True)]), 3)
              for kind, each in times.items() if "ddp" in times}
    if dist.get_rank() == 0:
        report({"benchmark": "outputs", "world": dist.get_world_size(), "model": name, "rounds": rounds, "share": share,
                "median_step_ms": medians, "ratio_to_ddp": ratios, "peak_above_mib": peaks, "recording_us": round(spent),
                "gathered": gathered})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL",
                        help=f"{', '.join(MODELS)}, or zoo:NAME")
    parser.add_argument("--contenders", nargs="+", default=["ddp", "hpml", "hpml_inside", "hpml_whole"])
    parser.add_argument("--share", action="store_true", help="as many rows per rank on any number of ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in args.models:
        compare(name, args.contenders, args.rounds, args.share)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
