"""Train within too little memory in each phase of a step, on a CPU: is the step repeated, and right?

    python benchmarks/step_out_of_memory.py [--shares 0.8 0.5]

During one phase of one step (the first, or a later one), the process may not allocate more than a share of what this phase took
without a limit (RLIMIT_AS; what it took is the growth of its resident memory, in a later step than the first but for the
optimizer, since the first step compiles). "recompute" is backward where blocks are recomputed, "microbatches" the step of two
microbatches, which forward runs. Each case trains 3 steps in float64 with `on_oom: "replan"`; the cases of a phase share a
process. A case is "within" where the phase had enough, "repeated" where it was repeated or stepped in parts; in both, all
losses and parameters are those without a limit to 1e-9. It is "refused" where the error is one of hpml's, which says what to
do. Else it is "WRONG" or "CRASHED".
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hpml_compiler.session import session
from passes.errors import HpmlError

STEPS, LATER, TOLERANCE = 3, 1, 1e-9
PHASES = ("forward", "backward", "recompute", "microbatches", "optimizer")
SETTINGS: dict[str, dict[str, Any]] = {"recompute": {"recompute": "full"}, "microbatches": {"microbatches": 2}}
WIDTH, ROWS, WORDS = 64, 16384, 1 << 14


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tables of words that are most of all parameters, and blocks whose activations are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(4)), nn.ModuleList(
            Block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = sum(words(ids) for words in self.words)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@contextlib.contextmanager
def at_most(nbytes: float | None) -> Iterator[None]:
    """Let this process allocate no more than this."""
    if nbytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + int(nbytes), resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def growth(grown: dict[tuple[str, int], int], key: tuple[str, int]) -> Iterator[None]:
    """Note by how many bytes the resident memory of this process exceeds that at the start, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = psutil.Process().memory_info().rss
    yield
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    grown[key] = 1024 * int(peak.split()[1]) - before


def trained(options: dict[str, Any], phase: str = "", step: int = -1, nbytes: float = 0.0,
            grown: dict[tuple[str, int], int] | None = None) -> list[torch.Tensor]:
    """Losses of all steps, and parameters. grown: takes the bytes of each phase and step."""
    torch.manual_seed(0)
    model, batch = Net().double(), (torch.randint(0, WORDS, (ROWS,)),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "monitor": False, **options})

    def limit(name: str) -> Any:
        if grown is not None:
            return growth(grown, (name, len(losses)))
        return at_most(nbytes if len(losses) == step and name == phase else None)

    losses = list[torch.Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        with limit("forward"):
            loss = call(*batch)
        with limit("backward"):
            loss.backward()
        with limit("optimizer"):
            optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(each.detach().clone() for each in model.parameters())]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [record.getMessage()] if "nothing is lost" in record.getMessage() else []


def cases(phase: str, shares: list[float]) -> Iterator[dict[str, Any]]:
    options = SETTINGS.get(phase, {})
    half = {"recompute": "backward", "microbatches": "forward"}.get(phase, phase)
    grown, seen = dict[tuple[str, int], int](), Lines()
    expected = trained(options, grown=grown)
    logging.getLogger("hpml").addHandler(seen)
    for step in (0, LATER):
        needs = grown[half, step if phase == "optimizer" else LATER]
        for share in shares:
            torch.compiler.reset()
            session.reset()
            gc.collect()
            seen.lines = []
            found: dict[str, Any] = {"phase": phase, "step": step, "share": share, "limit_mib": round(share * needs / 2**20, 1)}
            try:
                values = trained({**options, "on_oom": "replan"}, half, step, share * needs)
            except Exception as error:  # noqa: BLE001
                yield {**found, "outcome": "refused" if isinstance(error, HpmlError) else "CRASHED",
                       "says": f"{type(error).__name__}: {error}"[:600]}
                continue
            worst = max(float((a - b).abs().max()) for a, b in zip(values, expected, strict=True))
            outcome = "WRONG" if worst > TOLERANCE else "repeated" if seen.lines else "within"
            yield {**found, "outcome": outcome, "worst": worst, "says": "; ".join(seen.lines)[:400]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 0.5])
    parser.add_argument("--phases", nargs="+", default=PHASES)
    parser.add_argument("--here", action="store_true", help="run the cases of one phase in this process")
    chosen = parser.parse_args()
    if chosen.here:
        for each in cases(chosen.phases[0], chosen.shares):
            print(json.dumps(each), flush=True)
        return
    for phase in chosen.phases:
        command = [sys.executable, __file__, "--here", "--phases", phase, "--shares", *map(str, chosen.shares)]
        ran = subprocess.run(command, check=False, env={
            **os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"})
        if ran.returncode:
            print(json.dumps({"phase": phase, "outcome": "CRASHED", "code": ran.returncode}), flush=True)


if __name__ == "__main__":
    main()
