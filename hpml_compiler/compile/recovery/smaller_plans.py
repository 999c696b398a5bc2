"""Options for a graph that ran out of memory: less and less of it, by recomputation, microbatches and offloading."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpml_compiler.options import Options
from hpml_compiler.runtime.process.out_of_memory import StepTooLarge, room_bytes
from hpml_compiler.runtime.process.world_group import from_all_ranks
from hpml_compiler.visualize.formatting import format_bytes
from passes.errors import HpmlError, Infeasible

USABLE = 0.95
"""Part of the memory that is left which a plan may count on: allocators lose some of it."""
LESS = 0.8
"""Part of the predicted bytes, besides parameters, gradients and optimizer state, that the next plan may take where a plan ran
out of memory that should have fitted."""
MOST_PLANS = 8
MICROBATCHES = (2, 4, 8)


class SmallerPlans:
    """Options to try after a graph failed under `options`. held: bytes of its parameters, their gradients and optimizer state.
    peak: the predicted peak of the plan that failed last, or None. All ranks ask for the same."""

    def __init__(self, name: str, options: Options, held: int, peak: Callable[[], float | None]) -> None:
        self.name, self.given, self.held, self.peak = name, options, held, peak
        self.least: tuple[float, dict[str, Any]] | None = None
        self.tried: list[str] = []
        self.refused, self.at_least = "", False
        self.changes: list[dict[str, Any]] = []

    def next(self, failure: str) -> Options:
        """The options to try first after the graph ran out of memory. failure: its words."""
        if len(self.tried) >= MOST_PLANS:
            raise self.too_large(failure)
        found = from_all_ranks((self.held + USABLE * room_bytes(), self.peak()))
        room, peak = min(each for each, _ in found), min((each for _, each in found if each), default=None)
        given = self.given.memory_budget
        if peak is None and isinstance(given, int):
            peak = given
        budget = round(room if peak is None or room < USABLE * peak else peak - (1 - LESS) * max(peak - self.held, 0.1 * peak))
        self.changes = [{"memory_budget": budget}]
        if self.given.stage_ranks == 1:
            self.changes += [{"memory_budget": budget, "microbatches": n * self.given.microbatches} for n in MICROBATCHES]
        if not self.given.offloads("saved"):
            everything = "all" if self.given.offloads("optimizer") else "saved"
            self.changes.append({"memory_budget": budget, "offload": everything})
        self.least = None
        return self._taken()

    def after_refusal(self, error: HpmlError, failure: str) -> Options:
        """The options to try where no plan for the last ones was found."""
        self.refused = f" (the last: {error.what})"
        smallest = error.smallest_budget_bytes if isinstance(error, Infeasible) else None
        if smallest is not None and (self.least is None or smallest < self.least[0]):
            self.least = smallest, {**self.last, "memory_budget": int(smallest) + 1}
        if not self.changes and self.least is not None and not self.at_least:  # the smallest that there is
            self.changes, self.least, self.at_least = [self.least[1]], None, True
        if not self.changes:
            raise self.too_large(failure)
        return self._taken()

    def _taken(self) -> Options:
        self.last = self.changes.pop(0)
        self.tried.append(self.told())
        return self.given.model_copy(update={"plan": None, **self.last})

    def told(self) -> str:
        """The last change, in words."""
        words = [f"a memory_budget of {format_bytes(self.last['memory_budget'])}"]
        words += [f"{self.last['microbatches']} microbatches"] if "microbatches" in self.last else []
        words += ["saved activations offloaded"] if "offload" in self.last else []
        return ", ".join(words)

    def too_large(self, failure: str) -> StepTooLarge:
        return StepTooLarge(f"{failure}, and fits under none of these plans: {'; '.join(self.tried)}{self.refused}",
                            self.name,
                            "use fewer rows or more devices, or offload='optimizer'")
