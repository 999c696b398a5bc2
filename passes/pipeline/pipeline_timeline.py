"""Simulate a pipeline schedule from the times of each stage: duration of a step, and bytes in memory.

Results go to the next stage, gradients to the previous one, over the sender's communication stream; ranks receive while they
compute. With equal stages and free sends, the bubble is (p - 1) / m of the ideal time, interleaved (p - 1) / (v m)
(Narayanan et al., arXiv 2104.04473, section 2.2), and rank d holds the activations of m microbatches under gpipe, of
min(m, p - d) under 1f1b.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.errors import BadInput
from passes.pipeline.pipeline_schedule import PipelineSchedule, ScheduleAction, make_schedule
from passes.pipeline.schedule_orders import ScheduleName, stages_of
from passes.simulation.event_simulator import COMMUNICATION, StreamTask, simulate_tasks
from passes.simulation.step_timeline import NOTHING, EmbeddedCommunication, LiveInterval, TaskLabel


@dataclass(frozen=True)
class TimedStage:
    """One stage on one rank, times in µs for one microbatch.

    send_us: its result to the next stage; return_us: its gradient to the previous one (None: the send time of the
    previous stage). weight_us: the part of backward_us for gradients of weights, where a schedule splits backward (None:
    half). around_us: computed once, before the first microbatch or after the last; reduce_us: reduction of its gradients after
    the last microbatch; activation_bytes: saved for backward per microbatch in flight; held_bytes: parameters, gradients,
    optimizer state. forward_inside, backward_inside: communication between the ranks of the stage, a part of these times.
    """

    forward_us: float
    backward_us: float
    send_us: float = 0.0
    return_us: float | None = None
    reduce_us: float = 0.0
    optimizer_us: float = 0.0
    activation_bytes: float = 0.0
    held_bytes: float = 0.0
    weight_us: float | None = None
    around_us: float = 0.0
    forward_inside: EmbeddedCommunication = NOTHING
    backward_inside: EmbeddedCommunication = NOTHING

    def inside(self, action: ScheduleAction) -> EmbeddedCommunication:
        if action.kind == "forward":
            return self.forward_inside
        return self.backward_inside.part(self.us(action) / self.backward_us) if self.backward_us else NOTHING

    def us(self, action: ScheduleAction) -> float:
        if action.kind == "forward":
            return self.forward_us
        weight = self.backward_us / 2 if self.weight_us is None else self.weight_us
        if action.kind == "backward_weight":
            return weight
        return self.backward_us - weight if action.kind == "backward_input" else self.backward_us


@dataclass(frozen=True)
class PipelineTasks:
    """Tasks of one step, lane d = rank d; intervals by rank."""

    tasks: list[StreamTask]
    labels: list[TaskLabel]
    intervals: list[list[LiveInterval]]
    held_bytes: list[float]


@dataclass(frozen=True)
class SimulatedPipeline:
    """A simulated step. bubble: mean idle share of a rank; in_flight: for each stage, the peak number of microbatches with
    saved values."""

    step_us: float
    bubble: float
    in_flight: tuple[int, ...]


def simulate_pipeline(table: PipelineSchedule, stages: Sequence[TimedStage]) -> SimulatedPipeline:
    """Simulate a step without reductions and optimizers."""
    built = tasks_of(table, stages)
    spans = simulate_tasks(built.tasks, [1.0] * len(table.actions))
    work = sum(task.us for task, label in zip(built.tasks, built.labels) if label.work)
    ranks = len(table.actions)
    return SimulatedPipeline(spans.end_us, 1.0 - work / (ranks * spans.end_us) if spans.end_us else 0.0, table.in_flight())


def pipeline_tasks(
    stages: Sequence[TimedStage], microbatches: int, name: ScheduleName = "1f1b", devices: int | None = None
) -> PipelineTasks:
    """Tasks of a step, with reductions and optimizers. devices: p; as many as stages by default, fewer for schedules with
    several stages a rank (a whole number each). Raises BadInput where the numbers do not fit."""
    p = len(stages) if devices is None else devices
    if p < 1 or not stages or len(stages) % p:
        raise BadInput(f"{len(stages)} stages on {p} devices", "simulate", "every device takes the same number of stages")
    virtual = len(stages) // p
    table = make_schedule(name, p, microbatches, virtual)
    built = tasks_of(table, stages)
    number = {task.lanes[0]: k for k, (task, label) in enumerate(zip(built.tasks, built.labels)) if label.work}  # the last
    for device in range(p):
        _finish(built, [stages[s] for s in stages_of(name, device, p, virtual)], device, number[device])
    return built


def tasks_of(table: PipelineSchedule, stages: Sequence[TimedStage]) -> PipelineTasks:
    """Tasks of all computations and sends."""
    if len(stages) != table.stages:
        raise BadInput(f"times of {len(stages)} stages for a schedule of {table.stages}", "simulate", "give one for each stage")
    ranks = len(table.actions)
    built = PipelineTasks([], [], [[] for _ in range(ranks)], [0.0] * ranks)
    orders = [table.computed(rank) for rank in range(ranks)]
    # First all indices, then the dependencies: a task may wait for one of a later rank.
    number = {action: k for k, action in enumerate(action for own in orders for action in own)}
    messages = [action for own in table.actions for action in own
                if action.kind.startswith("send") and _send_us(stages, action) > 0]
    sends = {action: len(number) + k for k, action in enumerate(messages)}
    for rank, own in enumerate(orders):
        for before, action in zip((None, *own), own):
            after = [] if before is None else [number[before]]
            needed = table.needs(action)
            if needed is not None and not needed.computes:
                after.append(sends.get(needed.other_end, number[_made(table, needed.other_end)]))
            elif needed is not None:
                after.append(number[needed])
            built.tasks.append(StreamTask(stages[action.stage].us(action), after=tuple(after), lanes=(rank,)))
            built.labels.append(TaskLabel(name_of(action), "forward" if action.kind == "forward" else "backward", True,
                                          stages[action.stage].inside(action)))
    for action in messages:
        made = _made(table, action)
        built.tasks.append(StreamTask(_send_us(stages, action), COMMUNICATION, (number[made],), (table.ranks[action.stage],),
                                      len(built.tasks)))
        built.labels.append(TaskLabel(f"send {name_of(made)}", "send_recv", False))
    last = "backward_weight" if table.splits_backward else "backward"
    for action, index in number.items():
        if action.kind == "forward":
            end = number[ScheduleAction(last, action.stage, action.microbatch)]
            built.intervals[table.ranks[action.stage]].append(
                LiveInterval(stages[action.stage].activation_bytes, index, end, "saved"))
    for stage, rank in zip(stages, table.ranks):
        built.held_bytes[rank] += stage.held_bytes
    return built


def _made(table: PipelineSchedule, send: ScheduleAction) -> ScheduleAction:
    """The action whose result is sent."""
    if send.kind == "send_forward":
        return ScheduleAction("forward", send.stage, send.microbatch)
    return ScheduleAction("backward_input" if table.splits_backward else "backward", send.stage, send.microbatch)


def _finish(built: PipelineTasks, own: Sequence[TimedStage], device: int, last: int) -> None:
    """Add one device's work outside the microbatches, the reduction of its gradients, and the optimizer's step."""
    for us, label in ((sum(s.around_us for s in own), TaskLabel("around the loop", "backward", True)),
                      (sum(s.reduce_us for s in own), TaskLabel("gradients", "all_reduce", False)),
                      (sum(s.optimizer_us for s in own), TaskLabel("optimizer", "optimizer", True))):
        if us > 0:
            stream = 0 if label.work else COMMUNICATION
            built.tasks.append(StreamTask(us, stream, (last,), (device,), len(built.tasks)))
            built.labels.append(label)
            last = len(built.tasks) - 1


def _send_us(stages: Sequence[TimedStage], send: ScheduleAction) -> float:
    stage = stages[send.stage]
    if send.kind == "send_forward":
        return stage.send_us
    return stages[send.stage - 1].send_us if stage.return_us is None else stage.return_us


_LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def name_of(action: ScheduleAction) -> str:
    return f"{_LETTERS[action.kind]}{action.microbatch} of stage {action.stage}"
