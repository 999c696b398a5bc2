"""Measured timeline of one pipeline step on all ranks, to be drawn below the simulated schedule."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hpml_compiler.runtime.program.stage_timer import LoopTimes
from passes.pipeline.pipeline_timeline import name_of
from passes.simulation.step_timeline import TimelineEvent


def measured_schedule(loops: Sequence[LoopTimes]) -> list[TimelineEvent]:
    """Compute events of the stages of each rank in one step, without the time spent waiting for messages; lane d is rank d, and
    `pp` must be the only axis of the mesh. loops: this rank's loops of that step, from `recording`. It is collective over all
    ranks, which get the same result. Times count from the start of each rank's loop; a separate backward loop starts after the
    slowest rank's forward."""
    ranks: list[Any] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, actions_of(loops))
    return joined(ranks)


Actions = Sequence[Sequence[tuple[str, str, float, float]]]
"""Kind, name, start and end in µs of a rank's computations, by loop."""


def actions_of(loops: Sequence[LoopTimes]) -> Actions:
    return [[(each.action.kind, name_of(each.action), each.start_us + each.waited_us, each.end_us) for each in loop.done()]
            for loop in loops]


def joined(ranks: Sequence[Actions]) -> list[TimelineEvent]:
    """The actions of all ranks, in their order, on one axis of time."""
    found: list[TimelineEvent] = []
    begin = 0.0
    for number in range(max(map(len, ranks), default=0)):
        parts = [(lane, part) for lane, all_of in enumerate(ranks) for part in all_of[number:number + 1]]
        found += [TimelineEvent(lane, "compute", name, "forward" if kind == "forward" else "backward", begin + start,
                                begin + end)
                  for lane, part in parts for kind, name, start, end in part]
        begin = max((event.stop_us for event in found), default=begin)
    return found
