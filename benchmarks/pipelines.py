"""Stages of a pipeline: hpml's `{"pp": n}` against `torch.distributed.pipelining` with the same cut, schedule and microbatches
written by hand, each compiled with inductor and interleaved in one run.

    torchrun --nproc-per-node 2 benchmarks/pipelines.py [--model gpt@8] [--microbatches 8] [--schedules gpipe 1f1b interleaved]
        [--rounds 6] [--clock cpu] [--timeline step.svg]

For each schedule: the median step of the slowest rank and its ratio; on every rank the peak of what a step allocates above
parameters and the optimizer's state, measured and, of activations, by the plan; the bubble, which is the share of the loop in
which a rank computes nothing, measured on all ranks and played by the schedule with the times that were measured; the bytes
that ranks send, counted, beside those of the plan. With --outputs, the model returns its logits, too, and nobody reads them:
they add no bytes. Without a core for each rank the wall clock says nothing of a bubble: `cores` is reported.
"""
from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import build, median, report, turn
from memory import MIB, peak_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F
from two_ranks import CLOCKS, timed

import hpml_compiler
from hpml_compiler.monitor.stage_events import measured_schedule
from hpml_compiler.plans.pipeline_records import PipelinePlan
from hpml_compiler.runtime.process.device_clock import HostClock
from hpml_compiler.runtime.program.stage_timer import LoopTimes, recording
from hpml_compiler.simulate import simulate
from hpml_compiler.simulate.timeline_plot import draw
from passes import compat
from passes.pipeline.pipeline_schedule import make_schedule
from passes.pipeline.pipeline_timeline import TimedStage, simulate_pipeline

BY_HAND = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Part(nn.Module):
    """Some layers of a GPT, with what comes before the first and after the last of them."""

    def __init__(self, model: Any, layers: list[int]):
        super().__init__()
        self.layers = nn.ModuleList(model.layers[k] for k in layers)
        self.first, self.last = 0 in layers, len(model.layers) - 1 in layers
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x


def by_hand(name: str, pipe: PipelinePlan) -> Callable[[], float]:
    """A step as one writes it with torch's own stages and schedules."""
    model, (ids, labels) = build(name)
    rank, count = dist.get_rank(), len(pipe.stages)
    parts = {k: Part(model, layers) for k, layers in enumerate(layers_of(pipe)) if pipe.stages[k].rank == rank}
    stages = [PipelineStage(torch.compile(part), k, count, torch.device("cpu")) for k, part in parts.items()]

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    made = BY_HAND[pipe.schedule](stages if pipe.schedule == "interleaved" else stages[0], pipe.microbatches, loss_fn=loss_of)
    parameters = [p for part in parts.values() for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    update = compat.step_without_hooks(type(optimizer))  # without hpml's, which would make all ranks' parameters alike
    last = count - 1 in parts

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        made.step(*((ids,) if 0 in parts else ()), **({"target": labels, "losses": losses} if last else {}))
        update(optimizer)
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(loss, pipe.stages[-1].rank)  # every rank knows the loss, as in an unmodified script
        return float(loss)

    return step


def layers_of(pipe: PipelinePlan) -> list[list[int]]:
    """The layers in each stage, by the names of its blocks."""
    return [sorted({int(name.split(".")[1]) for name in stage.blocks if name.startswith("layers.")}) for stage in pipe.stages]


class WithLogits(nn.Module):
    """Returns what nobody reads, beside the loss."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.head = model.head

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.model
        x = model.tokens(ids) + model.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in model.layers:
            x = layer(x)
        logits = model.head(model.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class OnRanks:
    """A training that hpml runs through stages."""

    def __init__(self, name: str, options: dict[str, Any], logits: bool = False):
        hpml_compiler.reset()
        model, batch = build(name)
        if logits:
            model = WithLogits(model)
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.call = torch.compile(model, backend="hpml", options=options)

    def __call__(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        found = self.call(*self.batch)
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def pipeline(self) -> PipelinePlan:
        (graph,) = hpml_compiler.last_plan().graphs
        assert graph.pipeline is not None, graph.name
        return graph.pipeline


def by_rank(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def loops_of(step: Callable[[], float], steps: int = 5) -> list[list[LoopTimes]]:
    """By step, of this rank; ranks begin together."""
    found = []
    for _ in range(steps):
        dist.barrier()
        with recording(HostClock()) as loops:
            step()
        found.append(loops)
    return found


def bubbles(step: Callable[[], float], pipe: PipelinePlan) -> dict[str, Any]:
    """Measured, and played with the times measured."""
    recorded = loops_of(step)
    own = [[(done.action.kind, done.action.stage, done.work_us) for loop in loops for done in loop.done()]
           for loops in recorded]
    spans = [sum(loop.took_us for loop in loops) for loops in recorded]
    ranks = by_rank((own, spans))
    idle = []
    for k in range(len(own)):
        work = sum(us for each, _ in ranks for _, _, us in each[k])
        idle.append(1.0 - work / (len(ranks) * max(spans[k] for _, spans in ranks)))
    by_stage: dict[tuple[str, int], list[float]] = {}
    for each, _ in ranks:
        for steps in each:
            for kind, stage, us in steps:
                by_stage.setdefault((kind, stage), []).append(us)
    stages = [TimedStage(median(by_stage["forward", k]), median(by_stage["backward", k]), stage.send_us, stage.return_us)
              for k, stage in enumerate(pipe.stages)]
    table = make_schedule(pipe.schedule, pipe.ranks, pipe.microbatches, pipe.virtual_stages)
    return {"measured": median(idle), "played": simulate_pipeline(table, stages).bubble, "planned": pipe.bubble,
            "forward_us": [stage.forward_us for stage in stages], "backward_us": [stage.backward_us for stage in stages]}


def compared(name: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    ranks = dist.get_world_size()
    options = {"mesh": {"pp": ranks}, "microbatches": args.microbatches, "schedule": kind}
    if kind == "interleaved":
        options["virtual_stages"] = 2
    ours = OnRanks(name, options, args.outputs)
    first = ours()
    pipe = ours.pipeline()
    theirs = by_hand(name, pipe)
    other = theirs()
    torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-5)
    steps = {"hpml": ours, "by_hand": theirs}
    times: dict[str, list[float]] = {c: [] for c in steps}
    for k in range(args.rounds):
        for c in (list(steps) if k % 2 else list(steps)[::-1]):
            times[c] += turn(lambda step=steps[c]: timed(step, CLOCKS[args.clock]))
    found = {
        "benchmark": "pipelines", "model": name, "world": ranks, "cores": os.cpu_count(), "schedule": kind,
        "microbatches": args.microbatches, "rounds": args.rounds, "clock": args.clock,
        "blocks": [list(stage.blocks) for stage in pipe.stages],
        "median_step_s": {c: median(t) for c, t in times.items()},
        "ratio_to_by_hand": median([a / b for a, b in zip(times["hpml"], times["by_hand"])]),
        "bubble": bubbles(ours, pipe),
    }
    found["peak_mib"] = {c: by_rank(peak_of(step) / MIB) for c, step in steps.items()}
    found["saved_mib_planned"] = [stage.saved_bytes * stage.in_flight / MIB for stage in pipe.stages]
    (loops,) = loops_of(ours, steps=1)
    if args.timeline is not None:
        events = measured_schedule(loops)
        if dist.get_rank() == 0:
            draw(simulate(hpml_compiler.last_plan()), args.timeline.with_stem(f"{args.timeline.stem}-{kind}"), kind, events)
    found["sent_bytes"] = by_rank(sum(loop.sent_bytes for loop in loops))
    found["sent_bytes_planned"] = sum(each.bytes for stage in pipe.stages for each in stage.sends) * pipe.microbatches
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt@8", help="a GPT of models.py")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", default=list(BY_HAND), choices=BY_HAND)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--timeline", type=Path, help="draw each schedule, simulated and measured, into FILE-SCHEDULE")
    parser.add_argument("--outputs", action="store_true", help="the model returns its logits, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for kind in args.schedules:
        found = compared(args.model, kind, args)
        if dist.get_rank() == 0:
            report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
