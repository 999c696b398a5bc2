"""Record steps between optimizer steps: calls of each graph, and the time of each part.

A step ends with an optimizer step after which a compiled graph runs again: several optimizers, one after the other, end
one step together. It starts where the previous step ended, so the script's own work in between belongs to it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpml_compiler.monitor.prediction import GraphRuns
from hpml_compiler.runtime.process.device_clock import Clock

MOST_SPANS = 2000
"""Most graph calls with recorded times in one step; a step with more is not counted."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one step in µs: end to end, in calls of compiled graphs, and in optimizers."""

    step_us: float
    graphs_us: float
    optimizer_us: float

    @property
    def between_us(self) -> float:
        """Time outside of graphs and optimizers."""
        return max(self.step_us - self.graphs_us - self.optimizer_us, 0.0)


@dataclass
class RecordedStep:
    """Record of one step. start: clock mark of the previous step's end, None if there is none. counts: forward and backward
    calls by graph. spans: start and end marks of these calls. optimizer_spans: the same of optimizer steps, with the slice of
    `spans` of graphs that ran inside. disturbed: something that is not part of training ran in it."""

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
        """Signature of the work: steps that did the same have equal ones. It is cached, so read it after the step's end."""
        return (*self.runs, self.optimizer_steps)

    @property
    def calls(self) -> int:
        return sum(map(sum, self.counts.values()))

    @property
    def counts_as_training(self) -> bool:
        """True if the step is complete and undisturbed, and a gradient was computed in it."""
        return (self.start is not None and not self.disturbed and len(self.spans) == self.calls
                and any(backward for _, backward in self.counts.values()))

    def times(self, clock: Clock) -> StepTimes:
        graphs = [clock.elapsed_us(*span) for span in self.spans]
        optimizer = 0.0
        for start, end, inside in self.optimizer_spans:  # an optimizer with a closure runs the model
            optimizer += clock.elapsed_us(start, end) - sum(graphs[inside])
        return StepTimes(clock.elapsed_us(self.start, self.end), sum(graphs), optimizer)


class StepRecorder:
    """Records graph calls and optimizer steps; passes each step to `on_step` when the next one begins."""

    def __init__(self, clock: Clock, on_step: Callable[[RecordedStep], None]) -> None:
        self.clock, self.on_step = clock, on_step
        self.step = RecordedStep()
        self._optimizer_start: tuple[Any, int] | None = None

    def graph_begins(self, graph: int, backward: bool) -> Any:
        """Record the start of a graph call; returns a token for `graph_ends`."""
        if self.step.end is not None:
            self.finish()
            if self._optimizer_start is not None:  # a step with a closure has just begun
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
        """Mark the current step as disturbed: something else runs in it, such as a compilation."""
        if self.step.end is not None:
            self.finish()
        self.step.disturbed = True

    def finish(self) -> None:
        """End the step at its last optimizer step; does nothing without one."""
        ended = self.step
        if ended.end is None:
            return
        self.step = RecordedStep(start=ended.end)
        self.on_step(ended)

    def restart(self) -> None:
        """Restart after a pause in recording: the step that begins now has no known start."""
        self.step, self._optimizer_start = RecordedStep(), None


def most_common(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """The steps with the most common signature, the first one on a tie."""
    groups: dict[tuple, list[RecordedStep]] = {}
    for step in steps:
        groups.setdefault(step.signature, []).append(step)
    return max(groups.values(), key=len, default=[])
