"""A joint graph in plain numbers for the planner: operations, values and their possible placements.

Analyses fill it (`passes.analyses.placement_graph_builder`), partitioning reads it, rewriting maps it back by node names. It
holds no FX node and no tensor, so that it can be built by hand in tests.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from passes.graph.step_phase import Phase
from passes.json_records import FrozenMap
from passes.op_rules.base import Factors, Spec, Strategy

InputKind = Literal["parameter", "buffer", "batch", "tangent", "constant"]
ValueKind = InputKind | Literal["activation"]


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. `producer` is the index of its operation, or None for a graph input."""

    index: int
    name: str
    spec: Spec
    factors: Factors
    producer: int | None
    port: int = 0
    kind: ValueKind = "activation"
    trainable: bool = False
    batch: frozenset[tuple[int, int]] = frozenset()
    """The (dim, factor) pairs that stem from the batch dim of an input."""
    microbatch: frozenset[tuple[int, int]] = frozenset()
    """The microbatch factors among these, if there are microbatches. They are split in time, never over devices."""
    users: tuple[int, ...] = ()
    """Operations that read the value, each once, in order."""

    @property
    def bytes(self) -> int:
        return self.spec.bytes


@dataclass(frozen=True)
class Operation:
    """One call. `inputs` and `outputs` are value indices; a strategy has one placement for each."""

    index: int
    name: str
    target: str
    kind: str
    """"matmul", "attention", "convolution", "embedding" (worth a decision each), "view" or "pointwise"."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    flops: float
    phase: Phase
    block: str
    """Module path with list indices, e.g. `transformer.h.3`; "" outside of repeated modules."""
    ruled: bool = True
    linear: bool = False
    in_time: tuple[Strategy, ...] = ()
    """Strategies on the axis of time, the whole one first; () without microbatches."""

    @property
    def heavy(self) -> bool:
        return self.kind not in ("view", "pointwise")


@dataclass(frozen=True, repr=False)
class PlacementGraph:
    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    outputs: tuple[tuple[int, int | None], ...]
    """Graph outputs: (value, None), returned replicated, or (gradient, the input whose placement it takes): a parameter, or an
    input that arrives sharded."""
    unruled: FrozenMap[str, tuple[str, ...]] = FrozenMap()
    """Operators without a rule -> nodes."""
    saved: frozenset[int] = frozenset()
    """Values that forward saves for backward."""
    unread: FrozenMap[int, int | None] = FrozenMap()
    """Outputs that may stay sharded until they are read -> the tangent input, in the same layout, or None."""

    @cached_property
    def gradients(self) -> dict[int, int]:
        """Parameter -> its gradient."""
        return {p: v for v, p in self.outputs if p is not None and self.values[p].kind == "parameter"}

    @cached_property
    def weights(self) -> set[int]:
        """Parameters as operations read them: as they are stored, or through views and casts."""
        return self.seen_as(v.index for v in self.values if v.kind == "parameter")

    @cached_property
    def rows(self) -> int:
        """Rows of the batch in its inputs; 0 without any."""
        return common_rows(v.spec.shape for v in self.values if v.kind == "batch")

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches that the rows divide into; 1 without a loop."""
        return next((v.factors[dim][factor] for v in self.values for dim, factor in v.microbatch), 1)

    def seen_as(self, values: Iterable[int]) -> set[int]:
        """These values, and the results of views and casts of them."""
        found = set(values)
        for op in self.operations:
            if len(op.inputs) == 1 and op.inputs[0] in found and not op.heavy:
                found.update(op.outputs)
        return found

    def __repr__(self) -> str:
        return f"PlacementGraph({len(self.operations)} operations, {len(self.values)} values)"


def common_rows(shapes: Iterable[Sequence[int]]) -> int:
    """The most frequent size of dim 0 among data inputs; 0 without such inputs."""
    sizes = Counter(int(shape[0]) for shape in shapes if len(shape))  # a known size, even if it is a symbol
    return sizes.most_common(1)[0][0] if sizes else 0


def block_class(block: str) -> str:
    """Path with list indices starred, `transformer.h.*`: equal for the repetitions of a block."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", block)
