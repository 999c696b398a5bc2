"""Assignment of the calls of a joint graph to pipeline stages, and the values sent between stages.

A stage is a run of blocks, in the order of forward. Forward goes from stage 0 to the last one, backward
the other way, and a value that a more distant stage reads passes through those between. Nothing else is sent:

- calls on the batch alone, and gathers of parameters, are copied into each stage that reads them; inputs and tangents are
  given to each stage that reads them;
- gradients of a parameter that several stages read are computed in each of them, and summed where backward ends.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from passes.annotations import Key
from passes.graph.step_phase import Phase
from passes.json_records import FrozenMap


@dataclass(frozen=True)
class SentValue:
    """A value that stage `source` computes and `readers` read: later stages in forward, earlier ones in backward."""

    value: str
    source: int
    readers: tuple[int, ...]
    phase: Phase
    bytes: float

    def crosses(self, border: int) -> bool:
        """True if it crosses the border between the stages `border` and `border + 1`."""
        ends = (self.source, *self.readers)
        return min(ends) <= border < max(ends)


@dataclass(frozen=True)
class StageUnits:
    """Runs of blocks between which a stage may end. ends: the first block after each. times_us: computation of each in a step.
    crossing: bytes that cross after each but the last."""

    ends: tuple[int, ...] = ()
    times_us: tuple[float, ...] = ()
    crossing: tuple[float, ...] = ()

    def work_us(self, ends: Sequence[int]) -> list[float]:
        """Computation of stages that end before these blocks."""
        return [sum(us for end, us in zip(self.ends, self.times_us, strict=True) if start < end <= stop)
                for start, stop in zip([0, *ends], ends)]


@dataclass(frozen=True, repr=False)
class StageAssignment:
    """Stages by node name.

    of: the stage of every call. copied: the calls that each stage runs itself. sums: for a gradient that is summed over stages,
    the parts, each from another stage, in the order of addition; summed: the calls that add them, which are in no stage's
    graph. parameters: the stages that read a parameter, first the one that accumulates its gradient. blocks: names by stage.
    time_us: computation of each stage in a step; forward_us: the part of it in forward. units: that stages consist of.
    """

    count: int
    of: FrozenMap[str, int]
    copied: frozenset[str]
    sent: tuple[SentValue, ...]
    sums: FrozenMap[str, tuple[str, ...]]
    summed: frozenset[str]
    parameters: FrozenMap[str, tuple[int, ...]]
    blocks: tuple[tuple[str, ...], ...]
    time_us: tuple[float, ...]
    forward_us: tuple[float, ...]
    units: StageUnits = StageUnits()

    @property
    def ends(self) -> tuple[int, ...]:
        """The first block after each stage."""
        return tuple(accumulate(map(len, self.blocks)))

    def without_parameters(self) -> tuple[int, ...]:
        """Stages whose parameters are all read by another stage, too."""
        owners = {first for first, *_ in self.parameters.values()}
        return tuple(stage for stage in range(self.count) if stage not in owners)

    def over(self, border: int, phase: Phase) -> tuple[SentValue, ...]:
        """Values that cross the border after stage `border`, in order of computation."""
        return tuple(each for each in self.sent if each.phase == phase and each.crosses(border))

    def __repr__(self) -> str:
        return f"Stages({self.count} of {[len(blocks) for blocks in self.blocks]} blocks, {len(self.sent)} values sent)"


STAGES: Key[StageAssignment] = Key("stages", StageAssignment, scope="graph")
"""The stages that a joint graph is to be split into."""
