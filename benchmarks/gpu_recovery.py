"""Check of `gpu_pass.py`: a step that does not fit into the GPU's memory is repeated under a plan that takes less."""
from __future__ import annotations

import argparse
import gc
import logging
from typing import Any

import torch
from gpu_checks import large_model, loss_of, trainer
from step_out_of_memory import Lines

SHARES = (0.85, 0.65)
"""Parts of what the step takes beside parameters, gradients and optimizer state."""
STEPS = 4


def _trained(device: str, options: dict[str, Any]) -> tuple[list[float], torch.nn.Module]:
    gpt, batch = large_model("gpt", device)
    call = torch.compile(gpt, backend="hpml", options=options)
    step = trainer(gpt, call, batch, lambda: torch.autocast(device, torch.bfloat16))
    return [float(loss_of(step())) for _ in range(STEPS)], gpt


def _fresh() -> int:
    """Bytes that are left on the GPU once all models are gone."""
    from hpml_compiler.session import session

    torch.compiler.reset()
    session.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def out_of_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Steps within less memory (`torch.cuda.set_per_process_memory_fraction`), against steps with enough."""
    if args.device != "cuda":
        return {"ok": True, "says": "only on a GPU: tests fail CPU allocations"}
    total, cases = torch.cuda.mem_get_info()[1], {}
    handler = Lines()
    logging.getLogger("hpml").addHandler(handler)
    expected, model = _trained(args.device, {})
    held = 4 * sum(p.nbytes for p in model.parameters())
    model, peak = None, torch.cuda.max_memory_reserved()
    for share in SHARES:
        left = _fresh()
        limit = left + held + share * (peak - held)
        torch.cuda.set_per_process_memory_fraction(limit / total)
        handler.lines = []
        try:
            losses, model = _trained(args.device, {"on_oom": "replan"})
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        model, reserved = None, torch.cuda.max_memory_reserved()
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        cases[f"{share:g}"] = {"limit_bytes": limit, "reserved_bytes": reserved, "loss_apart": apart, "lines": handler.lines,
                               "ok": bool(handler.lines) and apart < 1e-3 and reserved <= limit}
        print(f"CASE {share:g}: {cases[f'{share:g}']}", flush=True)
    says = "; ".join(f"{name}: {_in_words(each)}" for name, each in cases.items())
    return {"ok": all(each["ok"] for each in cases.values()), "says": f"ample {peak / 2**20:.0f} MiB; {says}", "cases": cases}


def _in_words(case: dict[str, Any]) -> str:
    return (f"{'' if case['ok'] else 'OFF '}{case['reserved_bytes'] / 2**20:.0f} of {case['limit_bytes'] / 2**20:.0f} MiB, "
            f"{len(case['lines'])} repeated, loss apart {case['loss_apart']:.1e}")
