"""A step of a pipeline as it was measured, of all ranks: to be drawn below the schedule that was simulated."""
from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from hpml_compiler.runtime.program.stage_timer import LoopTimes
from passes.pipeline.pipeline_timeline import name_of
from passes.simulation.step_timeline import TimelineEvent


def measured_schedule(loops: Sequence[LoopTimes]) -> list[TimelineEvent]:
    """What the stages of each rank computed in one step, without waiting for messages; lane d is rank d, where `pp` is the
    only axis of the mesh. loops: what `recording` has found on this rank of that step. All ranks call it together and get the
    same. Times are since each rank began; where backward is a loop of its own, it follows the forward of the slowest rank."""
    own = [[(each.action.kind, name_of(each.action), each.start_us + each.waited_us, each.end_us) for each in loop.done()]
           for loop in loops]
    ranks: list[list[list[tuple[str, str, float, float]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    found: list[TimelineEvent] = []
    begin = 0.0
    for number in range(max(map(len, ranks))):
        parts = [(lane, part) for lane, all_of in enumerate(ranks) for part in all_of[number:number + 1]]
        found += [TimelineEvent(lane, "compute", name, "forward" if kind == "forward" else "backward", begin + start,
                                begin + end)
                  for lane, part in parts for kind, name, start, end in part]
        begin = max((event.stop_us for event in found), default=begin)
    return found
