"""What lies between two optimizer steps: which graphs ran how often, and how long each part took.

A step ends with an optimizer step after which a compiled graph runs again: several optimizers, one after the other, end
one step together. It starts where the step before it ended, so the script's own work in between belongs to it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpml_compiler.monitor.prediction import GraphRuns
from hpml_compiler.runtime.process.device_clock import Clock

MOST_SPANS = 2000
"""Calls of graphs in one step of which the times are kept; a step with more is not counted."""


@dataclass(frozen=True)
class StepTimes:
    """µs of one step: from end to end, in calls of compiled graphs, in optimizers."""

    step_us: float
    graphs_us: float
    optimizer_us: float

    @property
    def between_us(self) -> float:
        """Neither in graphs nor in optimizers."""
        return max(self.step_us - self.graphs_us - self.optimizer_us, 0.0)


@dataclass
class RecordedStep:
    """One step while it is recorded. start: a mark, None if nothing ended before it. counts: graph -> calls forward and
    backward. spans: marks of their beginnings and ends. optimizer_spans: the same, with the spans of graphs that ran
    inside. disturbed: something ran in it that is no part of training."""

    start: Any = None
    end: Any = None
    counts: dict[int, list[int]] = field(default_factory=dict)
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    optimizer_spans: list[tuple[Any, Any, slice]] = field(default_factory=list)
    optimizer_steps: int = 0
    disturbed: bool = False

    @property
    def runs(self) -> tuple[GraphRuns, ...]:
        return tuple(GraphRuns(graph, *counts) for graph, counts in sorted(self.counts.items()))

    @functools.cached_property
    def signature(self) -> tuple:
        """Steps with equal signatures did the same work. To be asked for when the step has ended."""
        return (*self.runs, self.optimizer_steps)

    @property
    def calls(self) -> int:
        return sum(map(sum, self.counts.values()))

    @property
    def counts_as_training(self) -> bool:
        """Whether it is whole and undisturbed, and a gradient was computed in it."""
        return (self.start is not None and not self.disturbed and len(self.spans) == self.calls
                and any(backward for _, backward in self.counts.values()))

    def times(self, clock: Clock) -> StepTimes:
        graphs = [clock.elapsed_us(*span) for span in self.spans]
        optimizer = 0.0
        for start, end, inside in self.optimizer_spans:  # an optimizer with a closure runs the model
            optimizer += clock.elapsed_us(start, end) - sum(graphs[inside])
        return StepTimes(clock.elapsed_us(self.start, self.end), sum(graphs), optimizer)


class StepRecorder:
    """Told of graph calls and optimizer steps as they happen; hands over each step when the next one begins."""

    def __init__(self, clock: Clock, on_step: Callable[[RecordedStep], None]) -> None:
        self.clock, self.on_step = clock, on_step
        self.step = RecordedStep()
        self._optimizer_start: tuple[Any, int] | None = None

    def graph_begins(self, graph: int, backward: bool) -> Any:
        """Returns what `graph_ends` wants back."""
        if self.step.end is not None:
            self.finish()
            if self._optimizer_start is not None:  # one with a closure, which has just begun
                self._optimizer_start = (self._optimizer_start[0], 0)
        step = self.step
        counts = step.counts.get(graph)
        if counts is None:
            counts = step.counts[graph] = [0, 0]
        counts[backward] += 1
        return self.clock.mark() if len(step.spans) < MOST_SPANS else None

    def graph_ends(self, begun: Any) -> None:
        if begun is not None:
            self.step.spans.append((begun, self.clock.mark()))

    def optimizer_begins(self) -> None:
        self._optimizer_start = (self.clock.mark(), len(self.step.spans))

    def optimizer_ends(self) -> None:
        step = self.step
        step.end = self.clock.mark()
        step.optimizer_steps += 1
        if self._optimizer_start is not None:
            start, first = self._optimizer_start
            step.optimizer_spans.append((start, step.end, slice(first, len(step.spans))))
        self._optimizer_start = None

    def disturb(self) -> None:
        """Something else runs now, such as a compilation: the step that it falls in is not like others."""
        if self.step.end is not None:
            self.finish()
        self.step.disturbed = True

    def finish(self) -> None:
        """End the step at its last optimizer step; does nothing if there was none."""
        ended = self.step
        if ended.end is None:
            return
        self.step = RecordedStep(start=ended.end)
        self.on_step(ended)

    def restart(self) -> None:
        """Begin anew, after it was told of nothing for a while: the step that begins now has no known start."""
        self.step, self._optimizer_start = RecordedStep(), None


def most_common(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """The steps of the signature that most of them have, the first of several."""
    groups: dict[tuple, list[RecordedStep]] = {}
    for step in steps:
        groups.setdefault(step.signature, []).append(step)
    return max(groups.values(), key=len, default=[])
