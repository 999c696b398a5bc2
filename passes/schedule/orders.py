"""Pipeline schedules as tasks: GPipe, 1F1B and interleaved 1F1B, from the times of each stage.

A stage runs forward and backward for each of m microbatches; a device holds one stage, or, interleaved, v of them
(virtual stages: stage s is on device s mod p). Results go to the next stage, gradients back to the one before, over
the sender's communication stream. What a device does, and in which order:

    gpipe         all forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019)
    1f1b          p - 1 - d forwards, then forward and backward in turn (Narayanan et al., "PipeDream", SOSP 2019)
    interleaved   the same over chunks of p microbatches per virtual stage: 2 (p - 1 - d) + (v - 1) p forwards come first
                  (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
                  SC 2021, arXiv 2104.04473, section 2.2); m must be a multiple of p

With equal stages and sends that take no time, the bubble is (p - 1) / m of the ideal time, interleaved (p - 1) / (v m)
(section 2.2 there), and device d holds the activations of m microbatches under gpipe, of min(m, p - d) under 1f1b.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from passes.errors import BadInput
from passes.schedule.assembly import Label
from passes.schedule.events import COMMUNICATION, Task
from passes.schedule.liveness import SAVED, Interval

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True)
class Stage:
    """One stage on one rank, times in µs for one microbatch.

    send_us: its result to the next stage; return_us: its gradient to the one before (None: as long as the stage before
    takes to send). reduce_us: its gradients' reduction after the last microbatch; activation_bytes: saved for backward
    per microbatch in flight; held_bytes: parameters, gradients, optimizer state.
    """

    forward_us: float
    backward_us: float
    send_us: float = 0.0
    return_us: float | None = None
    reduce_us: float = 0.0
    optimizer_us: float = 0.0
    activation_bytes: float = 0.0
    held_bytes: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """Tasks of one step, lane d = device d; intervals by device."""

    tasks: list[Task]
    labels: list[Label]
    intervals: list[list[Interval]]
    held_bytes: list[float]


Action = tuple[str, int, int]
"""("F" or "B", stage, microbatch)."""


def order(schedule: ScheduleName, device: int, devices: int, virtual: int, microbatches: int) -> list[Action]:
    """What a device does, in order."""
    if schedule == "gpipe":
        chunks = [device + k * devices for k in range(virtual)]
        return [("F", s, i) for s in chunks for i in range(microbatches)] + [
            ("B", s, i) for s in reversed(chunks) for i in range(microbatches)]
    forwards = [_nth(k, device, devices, virtual, False) for k in range(microbatches * virtual)]
    backwards = [_nth(k, device, devices, virtual, True) for k in range(microbatches * virtual)]
    warm = devices - 1 - device if virtual == 1 else 2 * (devices - 1 - device) + (virtual - 1) * devices
    warm = min(warm, len(forwards))
    actions = forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm :]


def _nth(k: int, device: int, devices: int, virtual: int, backward: bool) -> Action:
    """The k-th forward (backward) of a device: p microbatches through one virtual stage, then through the next."""
    if virtual == 1:
        return ("B" if backward else "F", device, k)
    round_, place = divmod(k, devices * virtual)
    chunk, microbatch = place // devices, round_ * devices + place % devices
    chunk = virtual - 1 - chunk if backward else chunk
    return "B" if backward else "F", chunk * devices + device, microbatch


def pipeline(
    stages: Sequence[Stage], microbatches: int, schedule: ScheduleName = "1f1b", devices: int | None = None
) -> Pipeline:
    """Tasks of a step. devices: p; as many as stages by default, fewer for "interleaved" (a whole number of stages each).

    Raises BadInput where the numbers do not fit.
    """
    p = len(stages) if devices is None else devices
    _check(stages, microbatches, schedule, p)
    built = Pipeline([], [], [[] for _ in range(p)], [0.0] * p)
    actions = [order(schedule, d, p, len(stages) // p, microbatches) for d in range(p)]
    # First all indices, then what waits for what: a task may wait for one of a later device.
    number = {action: i for i, action in enumerate(each for one in actions for each in one)}
    sends = {action: len(number) + i for i, action in enumerate(a for a in number if _send_us(stages, a) > 0)}
    for device, own in enumerate(actions):
        for position, action in enumerate(own):
            kind, s, _ = action
            before = [number[own[position - 1]]] if position else []
            source = _source(action, len(stages))
            if source is not None:
                before.append(sends.get(source, number[source]))
            us = stages[s].forward_us if kind == "F" else stages[s].backward_us
            built.tasks.append(Task(us, after=tuple(before), lanes=(device,)))
            built.labels.append(Label(_name(action), "forward" if kind == "F" else "backward", True))
    for action in sends:
        built.tasks.append(Task(_send_us(stages, action), COMMUNICATION, (number[action],), (action[1] % p,), len(built.tasks)))
        built.labels.append(Label(f"send {_name(action)}", "send_recv", False))
    for device, own in enumerate(actions):
        _finish(built, stages, device, p, number[own[-1]])
    for (kind, s, i), index in number.items():
        if kind == "F":
            built.intervals[s % p].append(Interval(stages[s].activation_bytes, index, number["B", s, i], part=SAVED))
    for s, stage in enumerate(stages):
        built.held_bytes[s % p] += stage.held_bytes
    return built


def _finish(built: Pipeline, stages: Sequence[Stage], device: int, devices: int, last: int) -> None:
    """The reduction of the gradients and the optimizer's step of one device."""
    own = stages[device::devices]
    for us, label in ((sum(s.reduce_us for s in own), Label("gradients", "all_reduce", False)),
                      (sum(s.optimizer_us for s in own), Label("optimizer", "optimizer", True))):
        if us > 0:
            stream = 0 if label.work else COMMUNICATION
            built.tasks.append(Task(us, stream, (last,), (device,), len(built.tasks)))
            built.labels.append(label)
            last = len(built.tasks) - 1


def _source(action: Action, stages: int) -> Action | None:
    """What an action waits for besides its place in the order."""
    kind, s, i = action
    if kind == "F":
        return ("F", s - 1, i) if s else None
    return ("B", s + 1, i) if s + 1 < stages else ("F", s, i)


def _send_us(stages: Sequence[Stage], action: Action) -> float:
    kind, s, _ = action
    if kind == "F":
        return stages[s].send_us if s + 1 < len(stages) else 0.0
    if s == 0:
        return 0.0
    back = stages[s].return_us
    return stages[s - 1].send_us if back is None else back


def _name(action: Action) -> str:
    return f"{action[0]}{action[2]} of stage {action[1]}"


def _check(stages: Sequence[Stage], microbatches: int, schedule: str, devices: int) -> None:
    if schedule not in SCHEDULES:
        raise BadInput(f"unknown schedule {schedule!r}", "simulate", f"legal ones: {', '.join(SCHEDULES)}")
    if microbatches < 1 or devices < 1 or not stages or len(stages) % devices:
        raise BadInput(f"{len(stages)} stages on {devices} devices with {microbatches} microbatches", "simulate",
                       "every device takes the same number of stages, one at least, and there is a microbatch")
    if schedule != "interleaved" and len(stages) != devices:
        raise BadInput(f"{len(stages)} stages on {devices} devices under {schedule}", "simulate",
                       "give as many stages as devices, or schedule='interleaved'")
    if schedule == "interleaved" and microbatches % devices:
        raise BadInput(f"{microbatches} microbatches on {devices} devices", "simulate",
                       "interleaved 1F1B takes a multiple of the devices (arXiv 2104.04473, section 2.2)")
