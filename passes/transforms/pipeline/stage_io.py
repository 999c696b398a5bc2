"""Inputs and results of a pipeline stage and of its halves: all that running a stage takes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from passes.graph.fx_nodes import returned_nodes

GRADIENT = "tangents_of_"
"""Prefix of the placeholder of a value that a stage receives in backward: torch's partitioner, and ours, recognize by it that
forward does not have the value."""


@dataclass(frozen=True)
class StageIO:
    """Inputs and outputs of a stage. Values have the names of their nodes in the whole graph.

    given: placeholders of the whole graph that it takes, in that graph's order; followed by `read`, those of `received` that it
    reads itself. It forwards the others. own_sent: returned first, of `sent`; then the whole graph's
    `outputs`, by index there. Backward first returns `gradients`, by index among those of the whole
    graph: those of `given`, none for `read`; then `own_sent_back`. fakes: of all received and sent values, as in the whole
    graph.
    """

    index: int
    given: tuple[str, ...]
    received: tuple[str, ...]
    read: tuple[str, ...]
    sent: tuple[str, ...]
    own_sent: tuple[str, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int | None, ...]
    received_back: tuple[str, ...]
    read_back: tuple[str, ...]
    sent_back: tuple[str, ...]
    own_sent_back: tuple[str, ...]
    fakes: Mapping[str, torch.Tensor]

    @property
    def forward_outputs(self) -> int:
        return len(self.own_sent) + len(self.outputs)


@dataclass(frozen=True)
class StageHalf:
    """A graph, and the names of its inputs and results, as lowering may replace their nodes."""

    gm: GraphModule
    takes: tuple[str, ...]
    returns: tuple[str | None, ...]


@dataclass(frozen=True)
class StageHalves:
    """Forward and backward of a stage. weight: the part of backward that runs later, where it is split; it may be all of it.
    saved: fakes of the values that backward takes from forward, by name."""

    forward: StageHalf
    backward: StageHalf | None
    weight: StageHalf | None
    saved: Mapping[str, torch.Tensor]


def half_of(gm: GraphModule) -> StageHalf:
    return StageHalf(gm, tuple(node.name for node in gm.graph.find_nodes(op="placeholder")),
                     tuple(None if node is None else node.name for node in returned_nodes(gm)))
