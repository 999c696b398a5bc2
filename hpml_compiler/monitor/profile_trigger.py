"""Profile one step of a run: once, on request, and while no other profiler runs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpml_compiler.monitor.prediction import GraphRuns
from hpml_compiler.monitor.profiled_step import KernelTimes, StepProfile
from hpml_compiler.monitor.step_recorder import RecordedStep
from passes import compat

TRIES = 5


class ProfileTrigger:
    """Profiles one step, from its first call of a training graph to the optimizer step that ends it.

    make: starts a profile. result: kernel times of the profiled step, and `step` its record; None until then. If a step turns
    out different from the requested one, its profile is dropped and the next step is tried.
    """

    def __init__(self, make: Callable[[], StepProfile]) -> None:
        self.make = make
        self.result: KernelTimes | None = None
        self.step: RecordedStep | None = None
        self._like: RecordedStep | None = None
        self._tries_left = TRIES
        self._running: StepProfile | None = None

    @property
    def is_wanted(self) -> bool:
        return self._like is not None and self.is_possible

    @property
    def is_possible(self) -> bool:
        """True if there is no result yet and tries are left."""
        return self.result is None and self._tries_left > 0

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def want(self, like: RecordedStep) -> None:
        """Request a profile of a step that does the same work as `like`."""
        self._like = like

    def result_for(self, runs: tuple[GraphRuns, ...]) -> KernelTimes | None:
        """The result, if the profiled step had these calls; else None."""
        return self.result if self.step is not None and self.step.runs == runs else None

    def call_begins(self, step: RecordedStep, first: bool, backward: bool = False) -> Any:
        """Record the start of a graph call. first: it is the step's first call of a training graph. Returns a token for
        `call_ends`."""
        if self._running is None:
            if not first or step.disturbed or not self.is_wanted:
                return None
            if compat.profiler_is_on():
                self._tries_left -= 1
                return None
            self._running = self.make()
            step.disturbed = True
        assert self._like is not None
        if step.calls > 2 * self._like.calls:  # the step is much longer, as with an evaluation
            self.give_up()
            return None
        return self._running, self._running.begin_graph(backward)

    @staticmethod
    def call_ends(token: Any) -> None:
        if token is not None:
            profile, entered = token
            profile.end_graph(entered)

    def optimizer_ended(self, step: RecordedStep, steady_bytes: int) -> None:
        if self._running is None or self._like is None or step.optimizer_steps < self._like.optimizer_steps:
            return
        if step.runs != self._like.runs:
            self.give_up()
            return
        running, self._running = self._running, None
        result = running.stop(steady_bytes)
        if result is None:  # the script used a profiler inside the step
            self._tries_left -= 1
        else:
            self.result, self.step = result, step

    def give_up(self) -> None:
        """Stop a running profile and drop it."""
        if self._running is not None:
            running, self._running = self._running, None
            self._tries_left -= 1
            running.cancel()
