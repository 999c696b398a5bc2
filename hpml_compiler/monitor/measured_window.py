"""Choose the steps to measure: a window after a warm-up, then more windows at growing intervals."""
from __future__ import annotations

from dataclasses import dataclass, field

from hpml_compiler.monitor.step_recorder import RecordedStep, most_common

WARM_UP = 5
STEPS = 10
FEWEST = 3
"""Steps needed for a report at the end of a short run."""


@dataclass
class MeasuredWindow:
    """A window of measured steps. seen: steps of the run so far, including those between windows."""

    warm_up: int = WARM_UP
    wanted: int = STEPS
    seen: int = 0
    samples: list[RecordedStep] = field(default_factory=list)

    def add(self, step: RecordedStep) -> bool:
        """Add a step; returns True if the window has enough steps now."""
        self.seen += 1
        if step.counts_as_training:
            self.samples.append(step)
        # With steps of several kinds, such as those of a GAN, the most frequent kind is enough after this many steps.
        enough = self.warm_up + self.wanted
        return len(most_common(self.samples[self.warm_up:])) >= self.wanted or len(self.samples) >= 4 * enough

    def chosen(self) -> list[RecordedStep]:
        """The steps to report on, all of one kind, without the warm-up (in a short run, without the first third)."""
        skipped = min(self.warm_up, len(self.samples) // FEWEST)
        return most_common(self.samples[skipped:])

    def close(self) -> int:
        """Start the next window; returns the number of steps to wait before it, as many as were seen so far."""
        wait = self.seen
        self.samples, self.warm_up, self.seen = [], 0, 2 * wait
        return wait
