"""Memory of other microbatches and stages of a rank while one microbatch runs through a stage."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from passes.pipeline.microbatches_in_flight import Moment
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.simulation.memory.storage_program import Microbatches, OtherMicrobatches
from passes.transforms.pipeline.stage_graphs import StageGraph

Moments = Mapping[int, tuple[Sequence[Moment], Sequence[Moment]]]
"""See `passes.pipeline.microbatches_in_flight.moments_of`."""


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage for one microbatch: values that it receives in forward and in backward, and its messages to the next
    and to the previous rank. late: between the two parts of backward, besides saved values where `waits`, that is, where
    backward has no first part. gradients: accumulated by all microbatches."""

    received: int
    received_back: int
    sent: int
    sent_back: int
    late: int
    gradients: int
    waits: bool


class RankMemory(NamedTuple):
    """Memory of a rank at the moments of a step. stages: bytes of each of its stages."""

    moments: Moments
    stages: Mapping[int, StageBytes]

    def others(self, stage: int, saved: Mapping[int, int]) -> Microbatches:
        """Other microbatches while one runs in a stage. saved: bytes that one microbatch saves in the other stages."""
        forward, backward = (tuple(dict.fromkeys(self._others(stage, moment, saved) for moment in moments))
                             for moments in self.moments[stage])
        return Microbatches(forward, backward)

    def _others(self, stage: int, moment: Moment, saved: Mapping[int, int]) -> OtherMicrobatches:
        number = nbytes = gradients = 0
        for k, load in moment.items():
            own, mine = self.stages[k], self._saved(k, moment)
            nbytes += load.waiting * own.late + load.ahead * own.received + load.ahead_back * own.received_back
            nbytes += load.sent * own.sent + load.sent_back * own.sent_back
            gradients += load.summed * own.gradients
            if k == stage:
                number = mine
            else:
                nbytes += mine * saved.get(k, 0)
        return OtherMicrobatches(number, nbytes, gradients)

    def _saved(self, stage: int, moment: Moment) -> int:
        """Other microbatches of a stage that have saved values."""
        load = moment[stage]
        return load.saved + self.stages[stage].waits * load.waiting


def in_flight(stage: int, moments: Moments, waits: bool) -> int:
    """Most microbatches of a stage that have saved values at a time. waits: see `StageBytes`."""
    loads = (moment[stage] for its in moments[stage] for moment in its)
    return 1 + max(load.saved + waits * load.waiting for load in loads)


def bytes_of(graph: StageGraph, names: Sequence[str]) -> int:
    """Bytes of values that a stage sends or receives."""
    return sum(graph.fakes[name].numel() * graph.fakes[name].element_size() for name in names)


def sends_on(table: PipelineSchedule, stage: int) -> bool:
    """True if a stage sends its results to another rank, which sends gradients back."""
    return 0 <= stage < table.stages - 1 and table.ranks[stage + 1] != table.ranks[stage]
