"""Saved and sent bytes of each layer of a deep model, from a few layers cut into stages of one layer each.

In every list of layers, the second traced layer represents all. Calls before a list are in the stage of its first layer, and
calls after it in that of its last layer.
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
    """A layer of a list, by number; or the calls before that list, after the previous one."""

    list: int
    layer: int | None = None


def starts_of(lists: Sequence[str]) -> tuple[str, ...]:
    """First block of each stage but stage 0. lists: paths, in the order of forward."""
    return tuple(f"{path}.{k}" for path in lists for k in range(1, LONG))


@dataclass(frozen=True)
class LayerCosts:
    """staged: cut at `starts_of` all lists; lists: their number. table: the schedule, which may split backward in two."""

    staged: StagedBody
    lists: int
    compiler: str
    table: PipelineSchedule

    @cached_property
    def _stages(self) -> list[tuple[int, float | None]]:
        return [saved_by(k, self.staged, self.compiler, self.table) for k in range(self.staged.stages.count)]

    def saved_bytes(self, place: LayerPosition) -> int:
        """Bytes saved for one microbatch."""
        if place.layer is not None:
            return self._stages[self._layer(place.list)][0]
        # One stage has these calls, with the last layer of the list before and the first of the one after.
        layers = [self._layer(k) for k in (place.list - 1, place.list) if 0 <= k < self.lists]
        return max(0, self._stages[(LONG - 1) * place.list][0] - sum(self._stages[k][0] for k in layers))

    def weight_share(self, place: LayerPosition) -> float | None:
        """Share of a layer's backward that runs later, where the schedule splits it; elsewhere, that of a neighbor layer."""
        return self._stages[self._layer(min(place.list, self.lists - 1))][1]

    def over(self, before: LayerPosition, after: LayerPosition, phase: Phase) -> tuple[SentPlan, ...]:
        """Values sent between two neighboring positions, for one microbatch."""
        if before.layer is not None and after.layer is not None and before.list == after.list:
            border = self._layer(before.list)
        elif before.layer is None:
            border = (LONG - 1) * after.list
        else:
            border = (LONG - 1) * (before.list + 1) - 1
        return sent(self.staged.stages.over(border, phase))

    @staticmethod
    def _layer(number: int) -> int:
        """Stage of the layer that represents all of a list."""
        return (LONG - 1) * number + 1
