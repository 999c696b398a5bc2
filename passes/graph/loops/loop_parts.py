"""The parts of a graph that is cut at its loop over microbatches, as `passes.transforms.microbatch.loop_split` cuts it."""
from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.fx import GraphModule

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MicrobatchRows:
    """Which rows a microbatch takes of a whole tensor, or fills in: see `passes.transforms.microbatch.loop_markers`."""

    apart: tuple[int, ...]
    dim: int
    size: tuple[int, ...]


@dataclass(frozen=True)
class LoopInput:
    """Something the loop reads: a value, or rows of it."""

    name: str
    rows: MicrobatchRows | None = None


@dataclass(frozen=True)
class LoopOutput:
    """Something that the loop makes: added up, or (rows) put together, under this name."""

    name: str
    rows: MicrobatchRows | None = None
    value: torch.Tensor | None = None
    """Fake: what is collected from one microbatch."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output that is collected from all microbatches."""
        assert self.value is not None, "what is collected is a tensor"
        return tuple(self.value.shape) if self.rows is None else self.rows.size

    @property
    def dtype(self) -> torch.dtype:
        """Type in which it is collected: gradients of 16 bits are accumulated in float32."""
        assert self.value is not None, "what is collected is a tensor"
        return torch.float32 if self.rows is None and self.value.dtype in HALF else self.value.dtype


@dataclass(frozen=True)
class GraphFragment:
    """A graph with the names of what it reads and makes; `gm` is None if there is nothing to do."""

    gm: GraphModule | None
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrologueEpilogue:
    """reads: what a microbatch's forward takes, `late`: what depends on tangents. forward, backward: what its halves make.
    before, after: what is done in forward, and what waits for backward. inputs: names of the graph's inputs. results: names of
    what it returns, or None where it returns nothing."""

    before: tuple[GraphFragment, GraphFragment]
    reads: tuple[LoopInput, ...]
    late: tuple[LoopInput, ...]
    forward: tuple[LoopOutput, ...]
    backward: tuple[LoopOutput, ...]
    after: tuple[GraphFragment, GraphFragment]
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]


@dataclass(frozen=True)
class LoopSplit(PrologueEpilogue):
    """body: one microbatch's joint graph, from `reads` and `late` to `forward` and `backward`."""

    body: GraphModule

    def around(self) -> PrologueEpilogue:
        return PrologueEpilogue(**{each.name: getattr(self, each.name) for each in fields(PrologueEpilogue)})
