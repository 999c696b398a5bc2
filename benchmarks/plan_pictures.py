"""Pictures of fifteen plans, of many kinds: all pictures of plans in docs/ and README.md.

    python benchmarks/plan_pictures.py FOLDER [--only NAME ...] [--png] [--saved] [--docs]

Every plan is saved in FOLDER beside its overview and the block that costs most (.svg; with --png also .png). --saved draws the
plans that are there. --docs draws into docs/images, too; then read what docs/guides/pictures.md says of each.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import models

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan

Target = tuple[nn.Module, Any]


def gpt(hidden: int, layers: int, heads: int, batch: int, vocab: int = 51200, seq: int = 2048) -> Callable[[], Target]:
    """GPT-2 in bfloat16, to be planned only."""
    def build() -> Target:
        config = T.GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocab, n_positions=seq, resid_pdrop=0.0,
                              embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, loss_type="ForCausalLM", dtype="bfloat16")
        return causal(lambda: T.GPT2LMHeadModel(config), batch, seq)

    return build


def causal(make: Callable[[], nn.Module], batch: int, seq: int) -> Target:
    with torch.device("meta"):
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return make().to(torch.bfloat16), {"input_ids": ids, "labels": ids}


def llama_8b() -> Target:
    config = T.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                           num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
                           dtype="bfloat16")
    return causal(lambda: T.LlamaForCausalLM(config), 16, 8192)


def mixtral() -> Target:
    config = T.MixtralConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=512, num_local_experts=4, max_position_embeddings=64)
    ids = torch.zeros(8, 32, dtype=torch.long)
    return T.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def t5() -> Target:
    config = T.T5Config(d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, vocab_size=512, dropout_rate=0.0,
                        decoder_start_token_id=0)
    ids = torch.zeros(8, 32, dtype=torch.long)
    return T.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :16].contiguous(), "use_cache": False}


def vit() -> Target:
    config = T.ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, num_labels=1000,
                         hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return T.ViTForImageClassification(config), {
        "pixel_values": torch.zeros(64, 3, 224, 224), "labels": torch.zeros(64, dtype=torch.long)}


class Recommender(nn.Module):
    """DLRM's shape: embedding tables of unlike sizes, two MLPs, and products of all pairs of features."""

    def __init__(self, rows: tuple[int, ...] = (1_000_000, 200_000, 50_000, 1000), width: int = 64):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 10, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(5, 5, -1)
        logits = self.top(torch.cat([low, products[:, row, column]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


def recommender() -> Target:
    return Recommender(), (torch.zeros(2048, 13), torch.zeros(2048, 4, dtype=torch.long), torch.zeros(2048))


class Broken(nn.Module):
    """Two graphs, with Python code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x).square().mean()


SMALL = gpt(512, 6, 8, batch=16, vocab=8192, seq=512)
CASES: dict[str, tuple[Callable[[], Target], str, dict[str, Any]]] = {
    "llama_8b": (llama_8b, "8x8:h100-80g", {}),
    "gpt_7_5b": (gpt(4096, 36, 32, batch=512), "4x8:a100-80g", {"mesh": {"pp": 4, "tp": 8}, "microbatches": 8}),
    "stages": (gpt(4096, 36, 32, batch=512), "4x8:a100-80g", {
        "mesh": {"pp": 4, "tp": 8}, "microbatches": 8, "schedule": "1f1b"}),
    "gpt_175b": (gpt(12288, 96, 96, batch=1536), "16x8:a100-80g", {
        "mesh": {"pp": 8, "dp": 2, "tp": 8}, "microbatches": 96, "virtual_stages": 2}),
    "zero3": (SMALL, "1x8:a100-80g", {"mesh": {"dp": 8}, "zero": 3}),
    "mixtral": (mixtral, "1x4:a100-80g", {}),
    "t5": (t5, "1x4:a100-80g", {}),
    "unet": (lambda: models.make("unet"), "1x4:a100-80g", {}),
    "vit": (vit, "1x4:a100-80g", {}),
    "embeddings": (recommender, "2x4:a100-80g", {}),
    "graph_breaks": (lambda: (Broken(), (torch.zeros(512, 256),)), "1x4:a100-80g", {}),
    "recompute": (SMALL, "1x1:a100-80g", {"memory_budget": "900MiB"}),
    "offload": (SMALL, "1x1:a100-80g", {"memory_budget": "450MiB", "offload": "saved"}),
    "microbatches": (SMALL, "1x4:a100-80g", {"mesh": {"dp": 4}, "microbatches": 4}),
    "not_split": (lambda: (nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), (torch.zeros(1, 3),)), "1x4:a100-80g", {}),
}
"""Name of the pictures -> model, cluster and options."""
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
OF_DOCS: dict[str, tuple[str, str]] = {
    "overview.svg": ("llama_8b", "overview"), "plan.svg": ("llama_8b", "block"), "stages.svg": ("stages", "overview"),
    **{f"plans/{name}.svg": (name, "overview") for name in CASES if name != "stages"},
    **{f"plans/{name}_block.svg": (name, "block") for name in ("recompute", "offload")},
}
"""Picture in docs/images -> the plan and the view."""


def draw(plan: Plan, folder: Path, name: str, kinds: tuple[str, ...]) -> float:
    """Draw both views. Returns the seconds of the slowest."""
    took = []
    for view in ("overview", "block"):
        for kind in kinds:
            start = time.perf_counter()
            plan.render(folder / f"{name}_{view}.{kind}", view=view)
            took.append(time.perf_counter() - start)
    return max(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    for flag in ("--png", "--saved", "--docs"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        start, saved = time.perf_counter(), given.folder / f"{name}.json"
        if not given.saved or not saved.exists():
            torch._dynamo.reset()
            build, cluster, options = CASES[name]
            made = hpml_compiler.plan(*build(), cluster=cluster, **options)
            assert isinstance(made, Plan)
            made.save(saved)
        plan, planned = Plan.load(saved), time.perf_counter() - start
        for picture, (case, view) in OF_DOCS.items() if given.docs else ():
            if case == name:
                plan.render(IMAGES / picture, view=view)
        drawn = draw(plan, given.folder, name, ("svg", "png") if given.png else ("svg",))
        print(f"{name}: planned in {planned:.1f} s, drawn in {drawn:.2f} s", flush=True)


if __name__ == "__main__":
    main()
