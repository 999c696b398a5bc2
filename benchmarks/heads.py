"""One device: heads of large vocabularies. Step time and peak of models that return their loss alone, or logits beside it.

    python benchmarks/heads.py [--rounds 5] [--models wide_vocabulary llama ...] [--backends inductor hpml]

Backends are eager, inductor, auto_chunker (inductor with torch's own chunking of the loss), hpml, and hpml:N (hpml with
`loss_chunks=N`; 1 computes the loss at once), interleaved, each in a process of its own. The loop reads the loss. A model's
name with ":loss" is the same model wrapped to return its loss alone; the wide vocabulary is a head of 16384 words on hidden
states of width 64, others are Hugging Face's with their real vocabularies at small widths.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from common import median, report, seconds, turn
from torch import nn

from hpml_compiler.monitor.profiled_step import StepProfile

BACKENDS = ("eager", "inductor", "auto_chunker", "hpml", "hpml:1")
WORDS, WIDTH = 16384, 64


class WideVocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(self.words(input_ids))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class LossAlone(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**batch)["loss"]}


def hugging_face(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(use_cache=False, **sizes)
        kind = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM",
                "ViT": "ForImageClassification"}.get(name, "ForCausalLM")
        return getattr(transformers, f"{name}{kind}")(config)

    return make


_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "wide_vocabulary": WideVocabulary,
    "llama": hugging_face("Llama", vocab_size=50257, hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
                          num_attention_heads=8),
    "gpt2": hugging_face("GPT2", vocab_size=50257, n_embd=128, n_layer=2, n_head=4),
    "gemma2": hugging_face("Gemma2", vocab_size=256000, num_key_value_heads=2, head_dim=32, **_SMALL),
    "qwen2": hugging_face("Qwen2", vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, **_SMALL),
    "t5": hugging_face("T5", vocab_size=32128, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4,
                       decoder_start_token_id=0),
    "bert": hugging_face("Bert", vocab_size=30522, **_SMALL),
}
ROWS = {"wide_vocabulary": (8, 256), "llama": (4, 256)}


class Contender:
    """A compiled model and its optimizer. held: bytes of parameters and gradients."""

    def __init__(self, name: str, backend: str) -> None:
        torch.manual_seed(0)
        model = MODELS[name.removesuffix(":loss")]()
        self.model = LossAlone(model) if name.endswith(":loss") else model
        torch._inductor.config.auto_chunker.enable = backend == "auto_chunker"
        chunks = backend.partition(":")[2]
        options = {"loss_chunks": int(chunks)} if chunks else None
        self.call = self.model if backend == "eager" else torch.compile(
            self.model, backend="hpml" if backend.startswith("hpml") else "inductor", options=options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        vocabulary = WORDS if name.startswith("wide") else model.config.vocab_size
        ids = torch.randint(0, vocabulary, ROWS.get(name.removesuffix(":loss"), (4, 128)))
        self.batch = {"input_ids": ids, "labels": ids.clone()}
        self.held = sum(2 * p.numel() * p.element_size() for p in self.model.parameters())

    def step(self) -> Any:
        found = self.call(**self.batch)
        found["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return found


def peak_above(step: Callable[[], Any], held: int) -> int:
    """Peak of a step above the bytes held by parameters and their gradients."""
    peaks = []
    for _ in range(3):
        profile = StepProfile("cpu")
        step()
        measured = profile.stop(held)
        peaks += [] if measured is None or measured.peak_bytes is None else [measured.peak_bytes]
    return min(peaks) - held


def work(name: str, backend: str, asked: Connection) -> None:
    """One contender, in a process of its own: Dynamo's caches belong to a process."""
    torch.set_num_threads(1)
    one = Contender(name, backend)
    first = seconds(one.step)
    one.step()
    asked.send(first)
    while (what := asked.recv()) is not None:
        asked.send(seconds(one.step) if what == "step" else peak_above(one.step, one.held))


def compare(name: str, backends: list[str], rounds: int) -> None:
    context, ends = torch.multiprocessing.get_context("spawn"), {}
    first = {}
    for backend in backends:
        ends[backend], other = context.Pipe()
        context.Process(target=work, args=(name, backend, other), daemon=True).start()
        first[backend] = ends[backend].recv()  # one compiles at a time

    def ask(backend: str, what: str) -> Any:
        ends[backend].send(what)
        return ends[backend].recv()

    times: dict[str, list[float]] = {backend: [] for backend in backends}
    for k in range(rounds):
        for backend in (backends if k % 2 else backends[::-1]):
            times[backend] += turn(lambda backend=backend: ask(backend, "step"), steps=1)
    report({
        "benchmark": "heads", "model": name, "rounds": rounds, "first_step_s": first,
        "median_step_s": {backend: median(each) for backend, each in times.items()},
        "peak_above_mib": {backend: round(ask(backend, "peak") / 2**20, 1) for backend in backends},
    })
    for end in ends.values():
        end.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=["wide_vocabulary:loss", *MODELS])
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    args = parser.parse_args()
    if unknown := {each.partition(":")[0] for each in args.backends}.difference(BACKENDS):
        parser.error(f"unknown backends {sorted(unknown)}: those are {', '.join(BACKENDS)}")
    for name in args.models:
        compare(name, args.backends, args.rounds)


if __name__ == "__main__":
    main()
