"""What runs on the lanes of a simulation; lanes of unlike devices side by side."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpml_compiler.simulate.assemble import OPTIMIZER, Label
from hpml_compiler.simulate.engine import COMMUNICATION, Task
from hpml_compiler.simulate.liveness import Interval
from passes.machine.device import Device


@dataclass(frozen=True)
class Lanes:
    """Tasks, with the label and the sort of kernel of each ("" for communication); of each lane, which bytes live when,
    the bytes held all the time, its ranks and their device (None: not known); and the joules that links take."""

    tasks: list[Task]
    labels: list[Label]
    intervals: list[list[Interval]]
    held_bytes: list[float]
    ranks: list[tuple[int, ...]]
    devices: list[Device | None]
    kernels: list[str]
    link_j: float

    @staticmethod
    def idle(ranks: int, device: Device | None) -> Lanes:
        """One lane whose ranks have nothing to do."""
        return Lanes([], [], [[]], [0.0], [tuple(range(ranks))], [device], [], 0.0)


def side_by_side(parts: Sequence[Lanes], summing: Sequence[int], sum_us: float, sum_j: float) -> Lanes:
    """One lane from each part, ranks numbered on, which meet where gradients are added up: in a task of `sum_us` on the
    lanes `summing`, before their optimizers run; its links take `sum_j`."""
    tasks: list[Task] = []
    steps: list[int] = []  # the optimizer of each lane that has one
    ranks: list[tuple[int, ...]] = []
    for lane, part in enumerate(parts):
        offset, first = len(tasks), sum(map(len, ranks))
        ranks.append(tuple(range(first, first + len(part.ranks[0]))))
        tasks += [replace(task, lanes=(lane,), after=tuple(i + offset for i in task.after)) for task in part.tasks]
        steps += [offset + i for i, label in enumerate(part.labels) if label.kind == OPTIMIZER]
    labels, kernels = [x for part in parts for x in part.labels], [x for part in parts for x in part.kernels]
    if len(summing) > 1:
        before = sorted({i for step in steps for i in tasks[step].after})
        for step in steps:
            tasks[step] = replace(tasks[step], after=(*tasks[step].after, len(tasks)))
        tasks.append(Task(sum_us, COMMUNICATION, tuple(before), tuple(summing), priority=len(tasks)))
        labels.append(Label("gradients of all groups", "all_reduce", False))
        kernels.append("")
    intervals = [
        [replace(each, first=_moved(each.first, offset), last=_moved(each.last, offset)) for each in part.intervals[0]]
        for part, offset in zip(parts, _offsets(parts))
    ]
    return Lanes(tasks, labels, intervals, [part.held_bytes[0] for part in parts], ranks,
                 [part.devices[0] for part in parts], kernels, sum_j + sum(part.link_j for part in parts))


def _offsets(parts: Sequence[Lanes]) -> list[int]:
    found = [0]
    for part in parts:
        found.append(found[-1] + len(part.tasks))
    return found[:-1]


def _moved(index: int | None, offset: int) -> int | None:
    return None if index is None else index + offset
