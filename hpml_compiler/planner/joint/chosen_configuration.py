"""A configuration that a search chose for a graph of a run, as data: all ranks pin it, and later launches read it."""
from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from hpml_compiler.options import Options
from hpml_compiler.plans.record_fields import Mesh, Record
from hpml_compiler.plans.schema import MeshAttempt
from passes.pipeline.schedule_orders import ScheduleName

FREE = "auto"


class ChosenConfiguration(Record):
    """mesh: None on one device. schedule: None where it is that of the options. memory_budget: None where the options have one.
    reason: the choice, its figures and why it was made, in a line. rejected: other configurations."""

    mesh: Mesh | None
    microbatches: int
    schedule: ScheduleName | None
    virtual_stages: int
    memory_budget: int | None
    reason: str
    rejected: Annotated[tuple[MeshAttempt, ...], Field(strict=False)] = ()

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return tuple((self.mesh or {}).items())

    def options(self, options: Options) -> Options:
        """The options with this configuration in place of what they leave open."""
        found: dict[str, Any] = {"mesh": self.mesh, "microbatches": self.microbatches, "virtual_stages": self.virtual_stages,
                                 "schedule": self.schedule, "memory_budget": self.memory_budget}
        pinned = {name for name in options.model_fields_set - options.chosen if getattr(options, name) not in (None, FREE)}
        if all((self.mesh or {}).get(name, 1) == size for name, size in (options.mesh or {}).items()):
            pinned.discard("mesh")
        return options.with_chosen({name: value for name, value in found.items()
                                    if value is not None and name not in pinned})
