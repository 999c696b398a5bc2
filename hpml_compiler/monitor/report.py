"""Report of predicted and measured figures, as a record and as text."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpml_compiler.visualize.formatting import format_bytes, format_us

TOLERANCE = 0.25
"""Relative error of a prediction above which a run warns."""

SHORT_US = 10_000.0
"""A measured step shorter than this is mostly Python overhead, which kernel prices do not predict and another plan does not
reduce."""


@dataclass(frozen=True)
class PredictedFigure:
    """One figure, predicted and measured: µs, bytes or joules."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else float("inf") if self.predicted else 1.0

    @property
    def is_off(self) -> bool:
        return abs(self.predicted - self.measured) > TOLERANCE * self.measured


@dataclass(frozen=True)
class Report:
    """Measured figures of one rank, and the predictions of its plans for the same work.

    step: number of optimizer steps so far, or of groups of them (`monitor.step_recorder`). steps_measured: number of steps that
    the medians are over. runs: calls of graphs in one such step, as text. step_time: in µs. graphs_us, optimizer_us,
    between_us: the parts of the measured step time in compiled graphs, in optimizers and between them. peak_memory: in bytes,
    None if it was not measured; memory_source: how it was measured. energy_j: predicted energy of the step on all devices in J,
    an estimate from data sheets, None if not known; measured_energy_j: measured by the power meter energy_source, None without
    one. classes, memory_parts: µs by class of work and bytes by part; empty if not measured.
    """

    step: int
    steps_measured: int
    runs: str
    step_time: PredictedFigure
    graphs_us: float
    optimizer_us: float
    between_us: float
    peak_memory: PredictedFigure | None = None
    memory_source: str = ""
    classes: tuple[PredictedFigure, ...] = ()
    memory_parts: tuple[PredictedFigure, ...] = ()
    energy_j: float | None = None
    measured_energy_j: float | None = None
    energy_source: str = ""
    rival_us: float | None = None
    """Predicted µs by which the best plan on another mesh is slower; None if there was no other."""
    losses: tuple[str, ...] = ()
    """For each graph that returns no loss: the call in the script by which its loss became part of the step, or the reason why
    it did not. Then, for each graph: in how many chunks its loss is computed on this rank."""
    outputs: tuple[str, ...] = ()
    """For each large output of a graph: in how many calls it was made, and which lines of the script read or gathered it."""

    @property
    def could_be_another_plan(self) -> bool:
        """True if correct prices could have led to another plan, because they change step times by more than the predicted
        difference to the best plan on another mesh. A factor common to all prices, as on a busy machine, is left out, since it
        changes both plans alike; without times by class of work it cannot be separated."""
        if self.rival_us is None:
            return False
        predicted, measured = (sum(getattr(each, name) for each in self.classes) for name in ("predicted", "measured"))
        if not predicted or not measured:
            return abs(self.step_time.measured - self.step_time.predicted) > self.rival_us
        shifts = (each.measured * predicted / measured - each.predicted for each in self.classes)
        return sum(shift for shift in shifts if shift > 0) > self.rival_us

    def text(self) -> str:
        """The report as one line."""
        return "; ".join((f"{self._time_and_memory()}{self._energy()}", *self.losses, *self.outputs))

    def _energy(self) -> str:
        found = [] if self.energy_j is None else [f"predicted {self.energy_j:.4g} J (estimated)"]
        found += [] if self.measured_energy_j is None else [f"{self.energy_source} {self.measured_energy_j:.4g} J"]
        return f"; energy per step {', '.join(found)}" if found else ""

    def _time_and_memory(self) -> str:
        time = self.step_time
        line = (f"step {self.step}: step time predicted {format_us(time.predicted)}, measured "
                f"{format_us(time.measured)} (ratio {time.ratio:.2f}; {format_us(self.graphs_us)} in compiled graphs, "
                f"{format_us(self.optimizer_us)} in the optimizer, {format_us(self.between_us)} between; median of "
                f"{self.steps_measured} steps of {self.runs})")
        if self.peak_memory is None:
            return f"{line}; peak memory not measured"
        memory = self.peak_memory
        return (f"{line}; peak memory predicted {format_bytes(memory.predicted)}, measured {format_bytes(memory.measured)} "
                f"(ratio {memory.ratio:.2f}; {self.memory_source})")

    def time_warning(self) -> str | None:
        """Warning that the predicted step time is off and another plan may be better; it names the worst class of work, then
        all classes. None otherwise: the figures are still in `text` and in `last_report()`."""
        time = self.step_time
        if not time.is_off or time.measured < SHORT_US or not self.could_be_another_plan:
            return None
        line = (f"the predicted step time is off by {_percent(time)}: predicted {format_us(time.predicted)}, measured "
                f"{format_us(time.measured)}")
        if not self.classes:
            return f"{line}; no step could be profiled, so the class of kernels that is off is unknown"
        worst = worst_of(self.classes)
        rest = ", ".join(f"{c.name} {format_us(c.predicted)} / {format_us(c.measured)}"
                         for c in self.classes if c.predicted or c.measured)
        return (f"{line}. The largest part is {worst.name}: predicted {format_us(worst.predicted)}, measured "
                f"{format_us(worst.measured)}. By class, predicted / measured: {rest}. "
                f"The best plan on another mesh was predicted to take only {format_us(self.rival_us or 0.0)} more and may be "
                "faster than this one; run `hpml profile` to measure costs here, see docs/monitoring.md")

    def memory_warning(self) -> str | None:
        """Warning that the predicted peak memory is off, with the worst part; None otherwise."""
        memory = self.peak_memory
        if memory is None or not memory.is_off or self.step_time.measured < SHORT_US:
            return None
        line = (f"the predicted peak memory is off by {_percent(memory)}: predicted {format_bytes(memory.predicted)}, "
                f"measured {format_bytes(memory.measured)} ({self.memory_source})")
        if not self.memory_parts:
            return line
        worst = worst_of(self.memory_parts)
        return (f"{line}. The largest part is {worst.name}: predicted {format_bytes(worst.predicted)}, measured "
                f"{format_bytes(worst.measured)}")


def worst_of(figures: tuple[PredictedFigure, ...]) -> PredictedFigure:
    """The figure with the largest difference between prediction and measurement."""
    return max(figures, key=lambda each: abs(each.predicted - each.measured))


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[PredictedFigure, ...]:
    return tuple(PredictedFigure(name, predicted.get(name, 0.0), measured.get(name, 0.0))
                 for name in dict.fromkeys([*predicted, *measured]))


def _percent(figure: PredictedFigure) -> str:
    return f"{abs(figure.predicted - figure.measured) / figure.measured:.0%}" if figure.measured else "100%"
