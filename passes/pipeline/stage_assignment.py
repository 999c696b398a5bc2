"""Stages of a pipeline: which of them every call of a joint graph is in, and what they hand to each other.

A stage is a run of blocks, in the order in which forward goes through them. Forward goes from stage 0 to the last one, backward
the other way, and a value that a stage further away reads passes through those between. Nothing else moves:

- what anybody can compute from the batch alone is copied into each stage that reads it, and so are inputs and tangents given
  to each stage that reads them;
- gradients of a parameter that several stages read are made in each of them, and added up where backward ends.
"""
from __future__ import annotations

from dataclasses import dataclass

from passes.annotations import Key
from passes.graph.step_phase import Phase
from passes.json_records import FrozenMap


@dataclass(frozen=True)
class SentValue:
    """A value that stage `source` makes and `readers` read: later ones in forward, earlier ones in backward."""

    value: str
    source: int
    readers: tuple[int, ...]
    phase: Phase
    bytes: float

    def crosses(self, border: int) -> bool:
        """Whether it goes over the border between the stages `border` and `border + 1`."""
        ends = (self.source, *self.readers)
        return min(ends) <= border < max(ends)


@dataclass(frozen=True, repr=False)
class StageAssignment:
    """Names are those of nodes.

    of: the stage of every call. copied: of these, the calls that each stage makes for itself. sums: of a gradient that is
    added up over stages, the parts, each made in another stage, in the order in which they are added; summed: the calls that
    add them, which are in no stage's graph. parameters: the stages that read a parameter, first the one where its gradient
    is whole. blocks: of each stage, by name. time_us: of each stage, of all that it computes in a step;
    forward_us: the part of it that is forward's.
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

    def without_parameters(self) -> tuple[int, ...]:
        """Stages that have no parameter of their own: what they read, another stage has, too."""
        owners = {first for first, *_ in self.parameters.values()}
        return tuple(stage for stage in range(self.count) if stage not in owners)

    def over(self, border: int, phase: Phase) -> tuple[SentValue, ...]:
        """What goes over the border after stage `border`, in the order in which it is made."""
        return tuple(each for each in self.sent if each.phase == phase and each.crosses(border))

    def __repr__(self) -> str:
        return f"Stages({self.count} of {[len(blocks) for blocks in self.blocks]} blocks, {len(self.sent)} values sent)"


STAGES: Key[StageAssignment] = Key("stages", StageAssignment, scope="graph")
"""The stages that a joint graph is to be split into."""
