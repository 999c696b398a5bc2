"""Which steps are measured: some after a warm-up, and later, ever more rarely, some again."""
from __future__ import annotations

from dataclasses import dataclass, field

from hpml_compiler.monitor.step_recorder import RecordedStep, most_common

WARM_UP = 5
STEPS = 10
FEWEST = 3
"""Steps that are enough for a report at the end of a short run."""


@dataclass
class MeasuredWindow:
    """The steps that are measured now. seen: steps of the run until now, those between windows included."""

    warm_up: int = WARM_UP
    wanted: int = STEPS
    seen: int = 0
    samples: list[RecordedStep] = field(default_factory=list)

    def add(self, step: RecordedStep) -> bool:
        """Take a step in; returns whether there are enough now."""
        self.seen += 1
        if step.counts_as_training:
            self.samples.append(step)
        # Steps of several kinds, such as those of a GAN: after so many, the most frequent kind will do.
        enough = self.warm_up + self.wanted
        return len(most_common(self.samples[self.warm_up:])) >= self.wanted or len(self.samples) >= 4 * enough

    def chosen(self) -> list[RecordedStep]:
        """The steps to report on: of one kind, without the warm-up, or without a third of them in a short run."""
        skipped = min(self.warm_up, len(self.samples) // FEWEST)
        return most_common(self.samples[skipped:])

    def close(self) -> int:
        """Begin the next window; returns how many steps to wait until then: as many as were seen so far."""
        wait = self.seen
        self.samples, self.warm_up, self.seen = [], 0, 2 * wait
        return wait
