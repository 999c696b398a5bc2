"""Pieces of a deep model of which a few layers are traced: what its stages consist of, and what they send.

A piece is one traced layer, or the calls before, between or after lists of layers, with the layers next to them, if these are
in the same stage. In every list of layers, the second traced layer represents all.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpml_compiler.planner.graph.few_layer_trace import LONG
from hpml_compiler.planner.pipeline.pipeline_graph_plan import sent, share_of_weights
from hpml_compiler.planner.pipeline.stage_halves import StagedBody, halves_of
from hpml_compiler.plans.pipeline_records import SentPlan
from passes.graph.step_phase import Phase
from passes.transforms.pipeline.stage_io import StageHalves


@dataclass(frozen=True)
class LayerPosition:
    """A layer of a list, by number; or the calls before that list, after the previous one."""

    list: int
    layer: int | None = None


class ModelSection(NamedTuple):
    """A list of layers, or the calls before it, with the first block of these. ends: a stage ends with it."""

    list: int
    block: str | None
    ends: bool


@dataclass(frozen=True)
class LayerPieces:
    """starts: first block of each piece but the first. of: piece of each traced layer, and of the calls around lists."""

    starts: tuple[str, ...]
    of: Mapping[LayerPosition, int]

    @staticmethod
    def cut(sections: Sequence[ModelSection], lists: Sequence[str]) -> LayerPieces:
        """sections: in the order of forward. lists: paths of the lists of layers."""
        starts, of, ended = list[str](), dict[LayerPosition, int](), False
        for section in sections:
            first = f"{lists[section.list]}.0" if section.block is None else section.block
            starts += [first] if ended else []
            if section.block is not None:
                of[LayerPosition(section.list)] = len(starts)
            else:
                for layer in range(LONG):
                    starts += [f"{lists[section.list]}.{layer}"] if layer else []
                    of[LayerPosition(section.list, layer)] = len(starts)
            ended = section.ends
        return LayerPieces(tuple(starts), of)

    def layer(self, number: int) -> int:
        """The piece that represents all layers of a list."""
        return self.of[LayerPosition(number, 1)]

    def within(self, places: Sequence[LayerPosition]) -> list[tuple[int, int]]:
        """The pieces of a stage in order, each with how often it is there."""
        runs: list[tuple[LayerPosition, int]] = []
        for place in places:
            here = LayerPosition(place.list, None if place.layer is None else 1)
            count = runs.pop()[1] if runs and runs[-1][0] == here else 0
            runs.append((here, count + 1))
        counts = [count for _, count in runs]
        for k, (place, _) in enumerate(runs):
            if place.layer is None:  # its piece has layers of the lists before and after it
                counts[k - 1] -= k > 0 and self.of[LayerPosition(place.list - 1, LONG - 1)] == self.of[place]
                if k + 1 < len(runs):
                    counts[k + 1] -= self.of[LayerPosition(place.list, 0)] == self.of[place]
        return [(self.of[place], count) for (place, _), count in zip(runs, counts) if count]

    def border(self, before: LayerPosition, after: LayerPosition) -> int:
        """The last piece before the border between two neighboring positions of different stages."""
        if before.layer is None:
            return self.of[before]
        return self.layer(before.list) if after.layer is not None and after.list == before.list else (
            self.of[LayerPosition(before.list, LONG - 1)])


@dataclass(frozen=True)
class LayerCosts:
    """staged: cut into pieces. lists: paths of the lists of layers. splits_backward: whether the schedule splits backward."""

    staged: StagedBody
    pieces: LayerPieces
    lists: Sequence[str]
    compiler: str
    splits_backward: bool

    @cached_property
    def halves(self) -> Callable[[int], StageHalves]:
        """Forward and backward of a piece."""
        known: dict[int, StageHalves] = {}

        def find(piece: int) -> StageHalves:
            if piece not in known:
                known[piece] = halves_of(self.staged.graphs[piece], self.compiler, self.splits_backward)
            return known[piece]

        return find

    def weight_share(self, place: LayerPosition) -> float | None:
        """Share of a layer's backward that runs later, where the schedule splits it; elsewhere, that of a neighbor layer."""
        piece = self.pieces.layer(min(place.list, len(self.lists) - 1))
        return share_of_weights(self.staged.graphs[piece], self.halves(piece)) if self.splits_backward else None

    def over(self, before: LayerPosition, after: LayerPosition, phase: Phase) -> tuple[SentPlan, ...]:
        """Values sent between two neighboring positions of different stages, for one microbatch."""
        return sent(self.staged.stages.over(self.pieces.border(before, after), phase))
