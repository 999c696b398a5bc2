"""Memory against time of a training step on one device: hpml under byte budgets, and other ways to save memory.

    python benchmarks/memory_frontier.py [--model gpt_memory unet] [--rounds 5] [--budgets 8] [--device cuda] [--json FILE]

Contenders: eager, inductor, inductor with torch's `activation_memory_budget`, inductor with `torch.utils.checkpoint` around
each block; hpml at budgets from the least that works to what inductor takes, and at what each of the others takes. All
train the same parameters with the same AdamW, each compiled from a copy of the model's code, so that all fit into memory
at once. First each is compiled, checked against eager's losses from the same start, and its bytes are counted in a third
step; then they are timed in turns, the order reversed in every second round, and the medians are reported.

Total: parameters, optimizer state, and the most that the allocator gives out besides during a step. A point of another
contender is met where a point of hpml takes no more bytes and at most 2 % more time.
"""
from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import build, median, report, seconds
from memory import MIB, Training, smallest_budget, training
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpml_compiler
from hpml_compiler.session import session

SHARES = [share / 10 for share in range(9, 0, -1)]
"""Of torch's activation_memory_budget."""
MORE_TIME = 1.02
STEPS = 2
"""Compared with eager's, before bytes are counted."""


@dataclass
class Point:
    """above: bytes of a step besides the state. predicted: hpml's own count of all bytes."""

    name: str
    call: Callable[..., Any]
    above: int = 0
    losses: list[float] = field(default_factory=list)
    budget: int | None = None
    predicted: int | None = None
    times: list[float] = field(default_factory=list)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


def checkpointed(model: nn.Module) -> nn.Module:
    """Each block of its lists of blocks."""
    for _, blocks in list(model.named_children()):
        if isinstance(blocks, nn.ModuleList):
            for number, block in enumerate(blocks):
                blocks[number] = Checkpointed(block)
    return model


class Contest:
    """Points of one model, which share its parameters and their optimizer."""

    def __init__(self, name: str, device: str, steps: int, compiler: str):
        self.name, self.steps, self.compiler = name, steps, compiler
        model, batch = build(name)
        self.training: Training = training(model, batch, device)
        self.start = {key: value.detach().clone() for key, value in model.state_dict().items()}
        self.points: list[Point] = []
        self.state_bytes = 0  # known when the optimizer has its state

    def copy(self) -> nn.Module:
        """The same parameters and buffers behind code of its own, which Dynamo knows nothing of."""
        own, _ = build(self.name)
        own.load_state_dict(self.training.model.state_dict(keep_vars=True), assign=True)
        return own

    def enter(self, name: str, call: Callable[..., Any], **more: Any) -> Point:
        """Compile, compare, count."""
        self._from_the_start()
        point = Point(name, call, **more)
        point.losses = [self.training.step(call) for _ in range(STEPS)]
        self.state_bytes = self.training.state_bytes()
        point.above = self.training.peak_above_state(call)
        self.points.append(point)
        print(f"{self.name}: {name}: {point.above / MIB:.1f} MiB above the state", file=sys.stderr, flush=True)
        return point

    def _from_the_start(self) -> None:
        self.training.model.load_state_dict(self.start)
        self.training.optimizer.state.clear()

    def total(self, point: Point) -> int:
        return self.state_bytes + point.above

    def hpml(self, budget: int) -> Point | None:
        """None where nothing meets the budget."""
        session.reset()
        name = f"hpml {budget / MIB:.1f} MiB"
        call = self._ours(budget)
        try:
            point = self.enter(name, call, budget=budget)
        except Exception as error:
            if smallest_budget(error) is None:
                raise
            print(f"{self.name}: {name}: refused", file=sys.stderr, flush=True)
            return None
        peak = hpml_compiler.last_plan().peak
        point.predicted = None if peak is None else peak.bytes
        return point

    def smallest(self) -> int:
        """The least budget, as hpml says it."""
        session.reset()
        self._from_the_start()
        try:
            self.training.step(self._ours(1))
        except Exception as error:
            if (found := smallest_budget(error)) is None:
                raise
            return found
        raise RuntimeError("a step does with one byte")

    def _ours(self, budget: int) -> Callable[..., Any]:
        return torch.compile(self.copy(), backend="hpml", options={"memory_budget": budget, "compiler": self.compiler})

    def compiled(self, model: nn.Module) -> Callable[..., Any]:
        """By torch itself."""
        return torch.compile(model, backend="inductor" if self.compiler == "inductor" else "aot_eager")

    def time(self, rounds: int) -> None:
        for k in range(rounds):
            for point in (self.points if k % 2 else self.points[::-1]):
                step = functools.partial(self.training.step, point.call)
                if self.steps > 1:
                    step()  # brings its data into the caches
                point.times.append(median([seconds(step) for _ in range(self.steps)]))


def peers(contest: Contest) -> Iterator[Point]:
    yield contest.enter("eager", contest.copy())
    yield contest.enter("inductor", contest.compiled(contest.copy()))
    for share in SHARES:
        with torch._functorch.config.patch(activation_memory_budget=share):  # pyright: ignore
            yield contest.enter(f"activation_memory_budget {share}", contest.compiled(contest.copy()))
    yield contest.enter("checkpoint", contest.compiled(checkpointed(contest.copy())))


def run(contest: Contest, rounds: int, budgets: int) -> dict[str, Any]:
    others = list(peers(contest))
    most, least = contest.total(others[1]), contest.smallest()
    spread = [round(least + (most - least) * k / max(budgets - 1, 1)) for k in range(budgets)]
    for budget in sorted({*spread, *(contest.total(point) for point in others)}, reverse=True):
        contest.hpml(budget)
    contest.time(rounds)
    return result(contest, others, rounds)


def result(contest: Contest, others: list[Point], rounds: int) -> dict[str, Any]:
    ours = [point for point in contest.points if point.budget is not None]
    eager, inductor = others[:2]
    return {
        "benchmark": "memory_frontier", "model": contest.name, "device": contest.training.device, "rounds": rounds,
        "threads": torch.get_num_threads(), "state_mib": contest.state_bytes / MIB,
        "points": [{
            "contender": point.name, "total_mib": contest.total(point) / MIB, "above_state_mib": point.above / MIB,
            "step_s": median(point.times), "ratio_to_inductor": _ratio(point, inductor),
            "budget_mib": None if point.budget is None else point.budget / MIB,
            "predicted_mib": None if point.predicted is None else point.predicted / MIB,
            "losses_apart": max(abs(a - b) / abs(b) for a, b in zip(point.losses, eager.losses, strict=True)),
        } for point in contest.points],
        "met": {point.name: _met(contest, point, ours) for point in others},
    }


def _ratio(point: Point, other: Point) -> float:
    """Of the times of the same rounds."""
    return median([a / b for a, b in zip(point.times, other.times, strict=True)])


def _met(contest: Contest, peer: Point, ours: list[Point]) -> dict[str, Any]:
    fits = [point for point in ours if contest.total(point) <= contest.total(peer)]
    if not fits:
        return {"met": False, "by": None, "time_ratio": None}
    best = min(fits, key=lambda point: _ratio(point, peer))
    return {"met": _ratio(best, peer) <= MORE_TIME, "by": best.name, "time_ratio": _ratio(best, peer)}


def table(found: dict[str, Any]) -> str:
    lines = [f"{found['model']} on {found['device']}, {found['threads']} threads, median of {found['rounds']} rounds; "
             f"parameters and optimizer state {found['state_mib']:.1f} MiB",
             f"{'contender':<30} {'total MiB':>10} {'above':>8} {'step':>10} {'ratio':>6} {'budget':>8} {'predicted':>9}"]
    for point in found["points"]:
        budget, predicted = (f"{point[key]:.1f}" if point[key] else "" for key in ("budget_mib", "predicted_mib"))
        lines.append(f"{point['contender']:<30} {point['total_mib']:>10.1f} {point['above_state_mib']:>8.1f} "
                     f"{1e3 * point['step_s']:>7.1f} ms {point['ratio_to_inductor']:>6.2f} {budget:>8} {predicted:>9}")
    for name, met in found["met"].items():
        how = f"by {met['by']}, {met['time_ratio']:.3f} of its time" if met["by"] else "nothing takes as little"
        lines.append(f"{name:<30} {'met' if met['met'] else 'NOT met'}: {how}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["gpt_memory", "unet"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", type=int, default=8, help="how many, from the least that works to what inductor takes")
    parser.add_argument("--steps", type=int, default=1, help="timed in each turn; where more than one, a step goes before them")
    parser.add_argument("--small", action="store_true", help="small models, and fewer of the others")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"], help="eager: to try this out")
    parser.add_argument("--json", type=Path, help="add a line of JSON for each model to this file, besides printing it")
    args = parser.parse_args()
    if args.small:
        SHARES[:] = [0.5]
    for name in args.model:
        contest = Contest(f"{name}_small" if args.small else name, args.device, args.steps, args.compiler)
        found = run(contest, args.rounds, args.budgets)
        print(table(found), file=sys.stderr)
        report(found)
        if args.json:
            with args.json.open("a") as file:
                print(json.dumps(found), file=file)


if __name__ == "__main__":
    main()
