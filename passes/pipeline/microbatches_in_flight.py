"""Microbatches that a rank of a pipeline has in memory at each moment of a schedule, by stage."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from passes.pipeline.pipeline_schedule import PipelineSchedule, ScheduleAction

FORWARD_KINDS = ("forward", "send_forward", "receive_forward")
"""Actions that run before the first backward if the loss is computed outside of the graph."""


@dataclass(frozen=True)
class StageLoad:
    """Microbatches of one stage in memory while a rank computes, without the one that it computes. saved: between their forward
    and their backward. waiting: between the two parts of backward, where a schedule splits it. ahead, ahead_back: received from
    the previous, or the next, stage, and not read yet. summed: whether gradients of some are accumulated. sent, sent_back:
    whether the last message to the next, or the previous, stage's rank is this stage's: it stays in memory until the next."""

    saved: int = 0
    waiting: int = 0
    ahead: int = 0
    ahead_back: int = 0
    summed: bool = False
    sent: bool = False
    sent_back: bool = False


Moment = dict[int, StageLoad]
"""By stage of the rank."""
_Moments = dict[tuple[StageLoad, ...], None]
"""Loads of the rank's stages, in order, each once."""


@dataclass
class _Counts:
    done: Counter[str] = field(default_factory=Counter)

    def load(self, running: str) -> StageLoad:
        """running: kind of the computation of this stage that runs; "" if another stage computes."""
        done, backward = self.done, self.done["backward"] + self.done["backward_input"]
        finished = done["backward"] + done["backward_weight"]
        return StageLoad(
            done["forward"] - backward - (running in ("backward", "backward_input")),
            backward - finished - (running == "backward_weight"),
            max(done["receive_forward"] - done["forward"] - (running == "forward"), 0),
            max(done["receive_backward"] - backward - (running in ("backward", "backward_input")), 0), finished > 0)


def moments_of(table: PipelineSchedule, rank: int, at_once: bool) -> dict[int, tuple[list[Moment], list[Moment]]]:
    """For each stage of a rank, the moments at which it runs forward, and backward, without those at which another one has as
    much of everything in memory. at_once: backward of a microbatch runs as soon as the schedule has it; otherwise forward of
    all of them runs first."""
    parts = (table.actions[rank],) if at_once else (_of(table, rank, True), _of(table, rank, False))
    counts = {stage: _Counts() for stage, its in enumerate(table.ranks) if its == rank}
    found: dict[int, tuple[_Moments, _Moments]] = {stage: ({}, {}) for stage in counts}
    for part in parts:
        _add_moments(found, counts, table, part)

    def fullest(moments: _Moments) -> list[Moment]:
        return [dict(zip(counts, moment, strict=True)) for moment in _fullest([*moments])]

    return {stage: (fullest(forward), fullest(backward)) for stage, (forward, backward) in found.items()}


def _add_moments(found: dict[int, tuple[_Moments, _Moments]], counts: dict[int, _Counts], table: PipelineSchedule,
                 actions: Sequence[ScheduleAction]) -> None:
    """Add the moments of these actions, after which all messages have arrived."""
    last: dict[int, ScheduleAction] = {}  # message to each rank
    for action in actions:
        if action.computes:
            sent = {(each.stage, each.kind) for each in last.values()}
            moment = tuple(replace(own.load(action.kind if stage == action.stage else ""),
                                   sent=(stage, "send_forward") in sent, sent_back=(stage, "send_backward") in sent)
                           for stage, own in counts.items())
            found[action.stage][action.kind != "forward"][moment] = None
        elif action.kind in ("send_forward", "send_backward"):
            last[table.ranks[action.other_end.stage]] = action
        counts[action.stage].done[action.kind] += 1
        if action.kind == "forward" and action.stage + 1 in counts:  # handed on without a message
            counts[action.stage + 1].done["receive_forward"] += 1
        if action.kind in ("backward", "backward_input") and action.stage - 1 in counts:
            counts[action.stage - 1].done["receive_backward"] += 1


def _fullest(moments: Sequence[tuple[StageLoad, ...]]) -> list[tuple[StageLoad, ...]]:
    """The moments without those that another one exceeds or equals in everything."""
    figures = {moment: [figure for load in moment for figure in astuple(load)] for moment in moments}
    return [moment for moment, own in figures.items() if not any(
        other is not moment and all(a <= b for a, b in zip(own, figures[other], strict=True)) for other in figures)]


def _of(table: PipelineSchedule, rank: int, forward: bool) -> list[ScheduleAction]:
    return [action for action in table.actions[rank] if (action.kind in FORWARD_KINDS) == forward]
