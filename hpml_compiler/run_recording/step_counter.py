"""Count the steps of a run and their times on the host, without asking the device.

A step ends with an optimizer step after which a compiled graph runs again, or the same optimizer steps again. The host runs at
most a few steps ahead of a device, so times over a window of a second are those of the device.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

STALLED, LEAST_STALL_S, USUAL_AFTER = 5.0, 0.5, 5
"""A step is a stall if it takes STALLED times the usual time and LEAST_STALL_S more, once USUAL_AFTER steps are known."""


@dataclass
class StepWindow:
    """Sums over a window of steps: their number, seconds, those of the longest, and what ran in them."""

    steps: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class StalledStep:
    step: int
    seconds: float
    usual_s: float


class StepCounter:
    """step: number of steps done. window: since the last `take`; the first step of a process has no start, and no time."""

    def __init__(self, step: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step, self.clock = step, clock
        self.window = StepWindow()
        self.stalled: StalledStep | None = None
        self._began: float | None = None
        self._ended: float | None = None
        self._stepped: set[int] = set()
        self._now = StepWindow()
        self._disturbed = False
        self._usual_s, self._known = 0.0, 0

    def optimizer_ended(self, optimizer: int) -> bool:
        """Note an optimizer step; optimizer: its id. Returns True if a step had ended before it."""
        finished = self._ended is not None and optimizer in self._stepped
        if finished:
            self.finish()
        self._ended = self.clock()
        self._stepped.add(optimizer)
        return finished

    def graph_called(self, samples: float, tokens: float, flops: float) -> bool:
        """Note the call of a compiled graph in training. Returns True if a step had ended before it."""
        finished = self._ended is not None
        if finished:
            self.finish()
        now = self._now
        now.samples, now.tokens, now.flops = now.samples + samples, now.tokens + tokens, now.flops + flops
        return finished

    def count(self, samples: float | None, tokens: float | None) -> None:
        """Set what this step has read, in place of what its graphs' inputs say."""
        self._now.samples = self._now.samples if samples is None else samples
        self._now.tokens = self._now.tokens if tokens is None else tokens

    def disturb(self) -> None:
        """Note that something else runs in this step, such as a compilation: it is no stall."""
        self._disturbed = True

    def finish(self) -> None:
        """End the step at its last optimizer step; does nothing without one."""
        if self._ended is None:
            return
        self.step += 1
        ran, began = self._now, self._began
        self.stalled = None
        if began is not None:
            took, into = self._ended - began, self.window
            into.steps, into.seconds = into.steps + 1, into.seconds + took
            into.longest_s = max(into.longest_s, took)
            into.samples, into.tokens = into.samples + ran.samples, into.tokens + ran.tokens
            into.flops += ran.flops
            self._compare(took)
        self._now, self._began, self._ended, self._disturbed = StepWindow(), self._ended, None, False
        self._stepped.clear()

    def _compare(self, took: float) -> None:
        usual = self._usual_s
        if self._known >= USUAL_AFTER and not self._disturbed and took > max(STALLED * usual, usual + LEAST_STALL_S):
            self.stalled = StalledStep(self.step, took, usual)
        elif not self._disturbed:
            self._known += 1
            self._usual_s = took if self._known == 1 else 0.9 * usual + 0.1 * took

    def take(self) -> StepWindow:
        """The window so far; the next one begins."""
        found, self.window = self.window, StepWindow()
        return found
