"""A pipeline schedule as a table: the actions of each rank in order, including sends and receives.

One table is checked, simulated and executed. Computations come from `passes.pipeline.schedule_orders`; this module adds
the sends and receives between neighboring stages on different ranks. All messages have one global order, which each rank
follows: so blocking sends and receives cannot deadlock. It is the order in which results are ready if a forward takes
half as long as a backward, which keeps waits short.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from passes.errors import HpmlError
from passes.pipeline.schedule_orders import Computed, ScheduleName, rank_orders, stages_of

Kind = Literal["forward", "backward", "backward_input", "backward_weight",
               "send_forward", "receive_forward", "send_backward", "receive_backward"]
_UNITS: dict[str, float] = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


@dataclass(frozen=True)
class ScheduleAction:
    """One action of a rank for a microbatch. A receive names the receiving stage, a send the sending one:
    send_forward of stage s goes with receive_forward of s + 1, send_backward of s with receive_backward of s - 1."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def computes(self) -> bool:
        return self.kind in _UNITS

    @property
    def other_end(self) -> ScheduleAction:
        """The receive of a send, or the send of a receive."""
        step = 1 if self.kind in ("send_forward", "receive_backward") else -1
        way, phase = self.kind.split("_")
        other: Kind = f"{'receive' if way == 'send' else 'send'}_{phase}"  # type: ignore[assignment]
        return ScheduleAction(other, self.stage + step, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """ranks: the rank of each stage; actions: of each rank, in order."""

    name: ScheduleName
    microbatches: int
    ranks: tuple[int, ...]
    actions: tuple[tuple[ScheduleAction, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are computed separately."""
        return any(action.kind == "backward_weight" for own in self.actions for action in own)

    def computed(self, rank: int) -> tuple[ScheduleAction, ...]:
        return tuple(action for action in self.actions[rank] if action.computes)

    def in_flight(self) -> tuple[int, ...]:
        """Peak number of microbatches with saved values, by stage; they are freed when all of backward has run."""
        most = [0] * self.stages
        held = [0] * self.stages
        for own in self.actions:
            for action in own:
                held[action.stage] += (action.kind == "forward") - (action.kind in ("backward", "backward_weight"))
                most[action.stage] = max(most[action.stage], held[action.stage])
        return tuple(most)

    def needs(self, action: ScheduleAction) -> ScheduleAction | None:
        """The action that a computation depends on outside its stage: a computation of another stage on this rank, or
        a receive."""
        if action.kind == "backward_weight":
            return None
        forward = action.kind == "forward"
        before = action.stage - 1 if forward else action.stage + 1
        if not 0 <= before < self.stages:
            return None
        if self.ranks[before] == self.ranks[action.stage]:
            return ScheduleAction(action.kind, before, action.microbatch)
        return ScheduleAction("receive_forward" if forward else "receive_backward", action.stage, action.microbatch)


@lru_cache(maxsize=8)  # parameter fits simulate the same schedule many times
def make_schedule(name: ScheduleName, ranks: int, microbatches: int, virtual: int = 1) -> PipelineSchedule:
    """Make and check the table of a schedule. Raises BadInput where the numbers do not fit."""
    orders = rank_orders(name, ranks, virtual, microbatches)
    rank_of = {stage: rank for rank in range(ranks) for stage in stages_of(name, rank, ranks, virtual)}
    of_stage = tuple(rank_of[stage] for stage in range(ranks * virtual))
    found = PipelineSchedule(name, microbatches, of_stage, _with_messages(orders, of_stage))
    check_schedule(found)
    return found


def _with_messages(orders: Sequence[Sequence[Computed]], rank_of: Sequence[int]) -> tuple[tuple[ScheduleAction, ...], ...]:
    """Computations in order of time, with a send and a receive for each result as soon as it is ready."""
    events: list[tuple[float, int, int, ScheduleAction]] = []  # time; messages first; sequence number
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(orders), [0] * len(orders)
    starts = [math.inf] * len(orders)  # of the next computation of each rank; infinite while its inputs are not ready

    def look(rank: int) -> None:
        when = _ready(orders[rank][at[rank]], done, len(rank_of)) if at[rank] < len(orders[rank]) else None
        starts[rank] = math.inf if when is None else max(free[rank], when)

    for rank in range(len(orders)):
        look(rank)
    for _ in range(sum(map(len, orders))):
        start = min(starts)
        if start == math.inf:
            raise HpmlError("the ranks of the pipeline deadlock", "schedule", "use another schedule")
        rank = starts.index(start)
        kind, stage, microbatch = orders[rank][at[rank]]
        events.append((starts[rank], 1, len(events), ScheduleAction(kind, stage, microbatch)))
        free[rank] = starts[rank] + _UNITS[kind]
        at[rank] += 1
        if kind == "backward_weight":
            look(rank)
            continue
        forward = kind == "forward"
        done["forward" if forward else "backward", stage, microbatch] = free[rank]
        other = stage + 1 if forward else stage - 1
        if 0 <= other < len(rank_of) and rank_of[other] != rank_of[stage]:
            send = ScheduleAction("send_forward" if forward else "send_backward", stage, microbatch)
            events += [(free[rank], 0, len(events), send), (free[rank], 0, len(events), send.other_end)]
        look(rank)
        if 0 <= other < len(rank_of):
            look(rank_of[other])
    events.sort(key=lambda event: event[:3])
    found: list[list[ScheduleAction]] = [[] for _ in orders]
    for *_, action in events:
        found[rank_of[action.stage]].append(action)
    return tuple(map(tuple, found))


def _ready(computed: Computed, done: dict[tuple[str, int, int], float], stages: int) -> float | None:
    """Time at which all inputs are ready; None if it is not known yet."""
    kind, stage, microbatch = computed
    if kind == "forward":
        return done.get(("forward", stage - 1, microbatch)) if stage else 0.0
    if kind == "backward_weight":
        return done.get(("backward", stage, microbatch))
    own = done.get(("forward", stage, microbatch))
    later = done.get(("backward", stage + 1, microbatch)) if stage + 1 < stages else own
    return None if own is None or later is None else max(own, later)


def check_schedule(table: PipelineSchedule) -> None:
    """Check that every stage runs each microbatch once each way, every message has two ends, and no rank deadlocks although
    messages block. Raises HpmlError with the violated condition."""
    for stage, rank in enumerate(table.ranks):
        own = [(action.kind, action.microbatch) for action in table.actions[rank] if action.computes and action.stage == stage]
        for microbatch in range(table.microbatches):
            kinds = sorted(kind for kind, each in own if each == microbatch)
            if kinds not in (["backward", "forward"], ["backward_input", "backward_weight", "forward"]):
                raise HpmlError(f"stage {stage} runs microbatch {microbatch} by {kinds}", f"schedule {table.name}",
                                "each stage runs forward once, and backward whole or in its two parts")
        if len({microbatch for _, microbatch in own}) != table.microbatches:
            raise HpmlError(f"stage {stage} does not run exactly the microbatches 0 to {table.microbatches - 1}",
                            f"schedule {table.name}", "run each of them once")
    at = [0] * len(table.actions)
    done: set[ScheduleAction] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(table.actions):
            while at[rank] < len(own) and _possible(table, own[at[rank]], at, done):
                action = own[at[rank]]
                done.add(action)
                at[rank] += 1
                if not action.computes:
                    done.add(action.other_end)
                    at[table.ranks[action.other_end.stage]] += 1
                moved = True
    for rank, own in enumerate(table.actions):
        if at[rank] < len(own):
            raise HpmlError(f"rank {rank} deadlocks at {own[at[rank]]}", f"schedule {table.name}",
                            "order the two ends of each message consistently on all ranks")


def _possible(table: PipelineSchedule, action: ScheduleAction, at: Sequence[int], done: set[ScheduleAction]) -> bool:
    """True if the next action of a rank can run: its input is ready, or the peer is at the other end of the message."""
    if action in done:
        return False  # a duplicate
    if action.computes:
        first: dict[str, Kind] = {"backward": "forward", "backward_input": "forward", "backward_weight": "backward_input"}
        own = ScheduleAction(first[action.kind], action.stage, action.microbatch) if action.kind in first else None
        return all(needed is None or needed in done for needed in (own, table.needs(action)))
    sends = action if action.kind.startswith("send") else action.other_end
    kinds = ("forward",) if sends.kind == "send_forward" else ("backward", "backward_input")
    if not any(ScheduleAction(kind, sends.stage, sends.microbatch) in done for kind in kinds):  # type: ignore[arg-type]
        return False
    if not 0 <= action.other_end.stage < table.stages:
        return False
    other = table.ranks[action.other_end.stage]
    own = table.actions[other]
    return at[other] < len(own) and own[at[other]] == action.other_end
