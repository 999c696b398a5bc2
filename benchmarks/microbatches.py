"""Microbatches on one device: step time and peak of `options={"microbatches": m}` over those of a loop written by hand under
inductor, interleaved in one process.

    python benchmarks/microbatches.py [--models gpt mlp_batch] [--microbatches 4] [--rounds 8]

By hand is `for part in batch.chunk(m): loss = call(part) / m; loss.backward()`, which adds gradients up in `.grad`; it means
the same where every part has as many rows (and, of a mean over tokens, as many tokens) as every other. `whole` is inductor
without microbatches; `hpml_blocks` compiles equal blocks once. Peaks are bytes above parameters and the optimizer's state.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import build, median, report, seconds, turn
from memory import MIB, Training

CONTENDERS = ("whole", "by_hand", "hpml", "hpml_blocks")


class ByHand(Training):
    """Goes through its batch part by part, as scripts do."""

    parts: int = 1

    def step(self, call: Callable[..., Any]) -> float:
        loss = 0.0
        for part in zip(*(x.chunk(self.parts) for x in self.batch), strict=True):
            own = call(*part) / self.parts
            own.backward()
            loss += float(own.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def contender(kind: str, name: str, microbatches: int) -> tuple[Training, Callable[..., Any]]:
    model, batch = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    training = (ByHand if kind == "by_hand" else Training)(model, optimizer, batch)
    if isinstance(training, ByHand):
        training.parts = microbatches
    if kind.startswith("hpml"):
        blocks = "on" if kind == "hpml_blocks" else "off"
        return training, torch.compile(model, backend="hpml", options={"microbatches": microbatches, "compile_blocks": blocks})
    return training, torch.compile(model)


def compared(name: str, microbatches: int, rounds: int) -> dict[str, Any]:
    steps, first, losses, peaks = {}, {}, {}, {}
    for kind in CONTENDERS:
        training, call = contender(kind, name, microbatches)
        step = steps[kind] = lambda training=training, call=call: training.step(call)
        first[kind] = seconds(step)
        losses[kind] = [step() for _ in range(2)][-1]
        peaks[kind] = training.peak_above_state(call) / MIB
    times: dict[str, list[float]] = {kind: [] for kind in CONTENDERS}
    for k in range(rounds):
        for kind in (CONTENDERS if k % 2 else CONTENDERS[::-1]):
            times[kind] += turn(lambda step=steps[kind]: seconds(step))
    return {
        "benchmark": "microbatches", "model": name, "microbatches": microbatches, "rounds": rounds,
        "median_step_s": {kind: median(t) for kind, t in times.items()},
        "ratio_to_by_hand": median([a / b for a, b in zip(times["hpml"], times["by_hand"])]),
        "ratio_of_blocks": median([a / b for a, b in zip(times["hpml_blocks"], times["hpml"])]),
        "peak_above_state_mib": peaks, "third_loss": losses, "first_step_s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "mlp_batch"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    for name in args.models:
        report(compared(name, args.microbatches, args.rounds))


if __name__ == "__main__":
    main()
