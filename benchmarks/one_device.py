"""One device: step time of `backend="hpml"` over `backend="inductor"`, interleaved in one process.

    python benchmarks/one_device.py [--rounds 10]
"""
from __future__ import annotations

import argparse

import torch
from common import MODELS, build, median, report, seconds, stepper, turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    for name in MODELS:
        steps, first = {}, {}
        for backend in ("inductor", "hpml"):
            model, batch = build(name)
            step = steps[backend] = stepper(torch.compile(model, backend=backend), model.parameters(), batch)
            first[backend] = seconds(step)
            step()
        times: dict[str, list[float]] = {backend: [] for backend in steps}
        for k in range(args.rounds):
            for backend in (list(steps) if k % 2 else list(steps)[::-1]):
                times[backend] += turn(lambda step=steps[backend]: seconds(step))
        report({
            "benchmark": "one_device", "model": name, "rounds": args.rounds,
            "median_step_s": {b: median(t) for b, t in times.items()},
            "step_ratio": median([a / b for a, b in zip(times["hpml"], times["inductor"])]), "first_step_s": first,
        })


if __name__ == "__main__":
    main()
