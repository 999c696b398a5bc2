"""Time of a step with a monitor and without, alternating, and growth of memory, files and threads with it; prints JSON.

python benchmarks/monitoring.py [--steps 2000] [--every 50] [--sinks tensorboard] [--port]
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time

import psutil
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--steps", type=int, default=2000, help="with the monitor, and as many without")
    given.add_argument("--every", type=int, default=50, help="steps before the other takes its turn")
    given.add_argument("--sinks", nargs="*", default=[])
    given.add_argument("--port", action="store_true", help="serve metrics to Prometheus, too")
    args = given.parse_args()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(200, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 200))
    call, optimizer = torch.compile(model, backend="hpml"), torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randint(0, 200, (8, 64))

    def step(monitor: hpml_compiler.Monitor | None) -> float:
        began = time.perf_counter()
        loss = F.cross_entropy(call(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log(loss=loss, lr=1e-4)
        return time.perf_counter() - began

    process, ratios, medians, grown = psutil.Process(), [], {False: [], True: []}, []
    with tempfile.TemporaryDirectory() as folder:
        kept = {"sinks": args.sinks, "metrics_port": 0 if args.port else None}
        with hpml_compiler.Monitor(folder, interval=1.0, **kept) as monitor:  # compiled under a monitor
            for _ in range(20):
                step(monitor)
        for turn in range(args.steps // args.every):
            times: dict[bool, float] = {}
            for on in ((False, True), (True, False))[turn % 2]:
                monitor = hpml_compiler.Monitor(folder, interval=1.0, **kept) if on else None
                found = [step(monitor) for _ in range(args.every)]
                if monitor is not None:
                    monitor.close()
                times[on] = statistics.median(found)
                medians[on].append(times[on])
            ratios.append(times[True] / times[False])
            grown.append((process.memory_info().rss, len(os.listdir("/proc/self/fd")), threading.active_count()))
        written = sum(os.path.getsize(os.path.join(folder, each)) for each in os.listdir(folder))
    first, last = grown[len(grown) // 4], grown[-1]
    print(json.dumps({
        "steps": args.steps,
        "step_ms": {name: 1e3 * statistics.median(medians[on]) for name, on in (("off", False), ("on", True))},
        "ratio": statistics.median(ratios), "ratios": [round(each, 4) for each in sorted(ratios)], "bytes_written": written,
        "grown": dict(zip(("bytes", "files", "threads"), (b - a for a, b in zip(first, last))))}))


if __name__ == "__main__":
    main()
