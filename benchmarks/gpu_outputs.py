"""Checks of `gpu_pass.py`: a loss that the script computes, on two ranks, and one device's large vocabulary.

The vocabulary is that of Llama 3.2 1B with 8 sequences of 2,048 tokens, parameters in bfloat16, AdamW: `auto_chunker` is
inductor with torch's own chunking of the loss; `liger` is liger-kernel's model in eager mode, where it is installed.
"""
from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks import HERE, WEIGHT_TOLERANCE, farthest, models_of, one_line, step_ms
from torch import nn

SPLITS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}}, "tp": {"mesh": {"tp": 2}}, "zero 3": {"mesh": {"dp": 2}, "zero": 3},
    "microbatches": {"mesh": {"dp": 2}, "microbatches": 2}, "chunks": {"mesh": {"tp": 2}, "loss_chunks": 4},
    "stages": {"mesh": {"pp": 2}, "microbatches": 2, "schedule": "1f1b"},
    "inductor": {"mesh": {"dp": 2}, "compiler": "inductor"},
}
STEPS = 5


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = models_of(str(HERE / "models.py")).GPT(width=64, layers=2, heads=4, vocab=512, length=16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.gpt.tokens(ids) + self.gpt.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.gpt.layers:
            x = layer(x)
        return self.gpt.head(self.gpt.norm(x))


def trained_outside(device: str, options: dict[str, Any] | None, dtype: torch.dtype = torch.float64,
                    ) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the script, the share of right words and the parameters, after a few steps."""
    model = Logits().to(device, dtype)
    ids = torch.randint(0, 512, (8, 16), generator=torch.Generator().manual_seed(1)).to(device)
    call = model if options is None else torch.compile(
        model, backend="hpml", options={"compiler": "eager", "costs": "roofline", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for k in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        logits = call(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        found.append(float(loss))
        if k % 2:
            found.append(float((logits.argmax(-1) == ids).double().mean()))
    return found, {key: value.detach().cpu() for key, value in model.state_dict().items()}


def outputs(args: argparse.Namespace) -> dict[str, Any]:
    """The script's loss on two ranks, split in several ways, against eager mode on one device."""
    from hpml_compiler.runtime.outputs.loss_memory import LossMemories
    from hpml_compiler.runtime.process.world_group import ensure_process_group
    from hpml_compiler.session import session
    from passes.session_state import state_of

    ensure_process_group()
    exact = trained_outside(args.device, None)
    rounded = trained_outside(args.device, None, torch.float32)
    figures: dict[str, dict[str, Any]] = {}
    for name, options in SPLITS.items():
        torch.compiler.reset()
        session.reset()
        single = "compiler" in options  # torch 2.11's inductor has no attention in float64 on CPUs
        (losses, state), dtype, limit = (rounded, torch.float32, 1e-4) if single else (exact, torch.float64, WEIGHT_TOLERANCE)
        try:
            mine, weights = trained_outside(args.device, options, dtype)
        except Exception as error:
            figures[name] = {"ok": False, "error": one_line(error)}
            continue
        apart = max(abs(a - b) for a, b in zip(mine, losses, strict=True))
        differ = farthest(weights, state)
        figures[name] = {"ok": max(apart, differ) < limit, "loss_apart": apart, "state_apart": differ,
                         "losses": [each.described() for each in state_of(LossMemories)]}
    says = "; ".join(f"{name}: {each['loss_apart']:.1e}" if each["ok"] else f"{name}: OFF {each.get('error', each)}"
                     for name, each in figures.items())
    return {"ok": all(each["ok"] for each in figures.values()), "says": says, "cases": figures}


LLAMA_1B = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": True,
            "use_cache": False}
LLAMA_SMALL = {**LLAMA_1B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2}
CASES = (("inductor", True), ("hpml", True), ("auto_chunker", True), ("liger", True), ("inductor", False), ("hpml", False),
         ("hpml:8", True))
"""Backend, and whether the model returns its loss or the script computes it from the logits."""


def heads(args: argparse.Namespace) -> dict[str, Any]:
    """Peak and time of a step of Llama 3.2 1B, each case in a process of its own, one at a time or, where the memory is large,
    two, of which one runs steps while the other compiles. args.name: part of the labels of the cases that are run."""
    context = torch.multiprocessing.get_context("spawn")
    cuda = args.device == "cuda"
    room = max(1, min(2, torch.cuda.mem_get_info()[1] // (60 << 30))) if cuda else 1
    gate, turn, queue = context.Semaphore(room), context.Lock(), context.Queue()
    workers = [context.Process(target=_one, args=(args.device, backend, inside, gate, turn, queue), daemon=True)
               for backend, inside in CASES if args.name in _label(backend, inside)]
    for worker in workers:
        worker.start()
    found: dict[str, dict[str, Any]] = {}
    for _ in workers:
        label, case = queue.get()
        found[label] = case
        print(f"CASE {label}: {case['says']}", flush=True)
    says = "; ".join(f"{label}: {case['says']}" for label, case in sorted(found.items()))
    last = {label: case["losses"][-1] for label, case in found.items() if "losses" in case}
    bad = [label for label, case in found.items() if "error" in case]
    bad += [label for label, loss in last.items() if abs(loss - statistics.median(last.values())) > 0.01]
    return {"ok": not bad, "says": says, "cases": found, "bad": bad}


def _label(backend: str, inside: bool) -> str:
    return f"{backend}, loss {'inside' if inside else 'outside'}"


def _one(device: str, backend: str, inside: bool, gate: Any, turn: Any, queue: Any) -> None:
    label = _label(backend, inside)
    with gate:
        try:
            case = _measured(device, backend, inside, turn)
        except Exception as error:
            case = {"error": one_line(error), "says": one_line(error)}
        queue.put((label, case))
        queue.close()
        queue.join_thread()


def _measured(device: str, backend: str, inside: bool, turn: Any) -> dict[str, Any]:
    import transformers

    if backend == "liger":
        if importlib.util.find_spec("liger_kernel") is None:
            return {"says": "not installed"}
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(LLAMA_1B if device == "cuda" else LLAMA_SMALL))
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (8, 2048 if device == "cuda" else 32), device=device)
    torch._inductor.config.auto_chunker.enable = backend == "auto_chunker"
    chunks = backend.partition(":")[2]
    call = model if backend == "liger" else torch.compile(
        model, backend="hpml" if backend.startswith("hpml") else "inductor",
        options={"loss_chunks": int(chunks)} if chunks else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> torch.Tensor:
        if inside:
            loss = call(input_ids=ids, labels=ids).loss
        else:
            logits = call(input_ids=ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    began = time.perf_counter()
    losses = [float(step())]
    first_s = time.perf_counter() - began
    losses += [float(step()) for _ in range(3)]
    with turn:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = min(step_ms(step, device, 8) for _ in range(3))  # others compile meanwhile, and try kernels out
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    held = sum(p.numel() * p.element_size() for p in model.parameters()) * 3  # with two moments
    return {"says": f"{ms:.1f} ms, {peak / 2**30:.2f} GiB", "ms": ms, "peak_bytes": peak, "held_bytes": held, "losses": losses,
            "first_step_s": first_s}
