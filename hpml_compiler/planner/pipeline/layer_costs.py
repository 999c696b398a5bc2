"""A few layers of a deep model cut into stages of one layer each: what each layer of the model saves, and hands to the next.

Of every list of layers, the second that is traced stands for all: what is before the list is with its first layer, what is
after it with its last.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpml_compiler.planner.graph.few_layer_trace import LONG
from hpml_compiler.planner.pipeline.pipeline_graph_plan import saved_by, sent
from hpml_compiler.planner.pipeline.stage_halves import StagedBody
from hpml_compiler.plans.pipeline_records import SentPlan
from passes.graph.step_phase import Phase
from passes.pipeline.pipeline_schedule import PipelineSchedule


@dataclass(frozen=True)
class LayerPosition:
    """A layer of a list, by number; or what lies before that list, after the one before it."""

    list: int
    layer: int | None = None


def starts_of(lists: Sequence[str]) -> tuple[str, ...]:
    """The block that each stage but the first begins with. lists: paths, in the order of forward."""
    return tuple(f"{path}.{k}" for path in lists for k in range(1, LONG))


@dataclass(frozen=True)
class LayerCosts:
    """staged: cut at `starts_of` so many lists. table: whether a schedule cuts backward in two."""

    staged: StagedBody
    lists: int
    compiler: str
    table: PipelineSchedule

    @cached_property
    def _stages(self) -> list[tuple[int, float | None]]:
        return [saved_by(k, self.staged, self.compiler, self.table) for k in range(self.staged.stages.count)]

    def saved_bytes(self, place: LayerPosition) -> int:
        """Of one microbatch."""
        if place.layer is not None:
            return self._stages[self._layer(place.list)][0]
        # A stage of the cut has it, with the last layer of the list before and the first of the one after.
        layers = [self._layer(k) for k in (place.list - 1, place.list) if 0 <= k < self.lists]
        return max(0, self._stages[(LONG - 1) * place.list][0] - sum(self._stages[k][0] for k in layers))

    def weight_share(self, place: LayerPosition) -> float | None:
        """The part of a layer's backward that runs later, where the schedule cuts it; elsewhere, of one beside it."""
        return self._stages[self._layer(min(place.list, self.lists - 1))][1]

    def over(self, before: LayerPosition, after: LayerPosition, phase: Phase) -> tuple[SentPlan, ...]:
        """What goes over the border between two places that follow each other, for one microbatch."""
        if before.layer is not None and after.layer is not None and before.list == after.list:
            border = self._layer(before.list)
        elif before.layer is None:
            border = (LONG - 1) * after.list
        else:
            border = (LONG - 1) * (before.list + 1) - 1
        return sent(self.staged.stages.over(border, phase))

    @staticmethod
    def _layer(number: int) -> int:
        """The stage of the layer that stands for all of a list."""
        return (LONG - 1) * number + 1
