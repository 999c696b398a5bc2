"""The placement decision as the rewrite applies it: layouts of operations, and the route of every value to its readers."""
from __future__ import annotations

from dataclasses import dataclass, field

from passes.graph.layouts import Layout
from passes.graph.step_phase import Phase
from passes.hardware.axis import Axes
from passes.json_records import FrozenMap


@dataclass(frozen=True)
class OperationLayouts:
    """Layouts of one operation: inputs, outputs, and outputs after immediate reductions."""

    inputs: tuple[Layout, ...]
    made: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True)
class Hop:
    """One change of a value's layout, and its phase."""

    layout: Layout
    phase: Phase


@dataclass(frozen=True)
class Route:
    """Layouts of a value from its producer (or storage) to one reader, source excluded."""

    value: int
    source: Layout
    hops: tuple[Hop, ...] = ()

    @property
    def target(self) -> Layout:
        return self.layout(len(self.hops))

    def layout(self, after: int) -> Layout:
        """The layout after that many collectives."""
        return self.hops[after - 1].layout if after else self.source


@dataclass(frozen=True)
class RouteSegment:
    """A part of a route that is paid once: the collectives from `start` up to `stop`, the end of the route.

    gradient: it ends at the gradient that the optimizer reads, so its reductions go into buckets. held: it ends at an
    unsharded parameter that the runtime holds.
    """

    route: Route
    start: int
    stop: int
    gradient: bool = False
    held: bool = False


@dataclass(frozen=True, repr=False)
class Decision:
    """`axes`: of all layouts. Keys are indices into the `PlacementGraph`."""

    axes: Axes
    inputs: FrozenMap[int, Layout]
    """Graph input -> layout in which the runtime passes it."""
    operations: FrozenMap[int, OperationLayouts]
    routes: FrozenMap[tuple[int, int], Route]
    """(operation, operand position) -> route."""
    outputs: tuple[Route, ...]
    """Route of every output of the graph, in order."""
    copies: FrozenMap[tuple[int, Phase], Layout] = field(default_factory=FrozenMap)
    """(value, phase) -> layout of the copy that several readers share."""
    held: FrozenMap[int, Route] = field(default_factory=FrozenMap)
    """Parameter -> route from its storage to the layout in which the runtime passes it, where the two differ: taken once
    a step, before the first call of the graph; the result is held until the optimizer changes the parameter."""

    def stored(self, parameter: int) -> Layout:
        """Layout of a parameter between steps, with its gradient and its optimizer state."""
        return self.held[parameter].source if parameter in self.held else self.inputs[parameter]

    def __repr__(self) -> str:
        return f"Decision({dict((axis.name, axis.size) for axis in self.axes)}, {len(self.operations)} operations)"


AFTER = "after"
"""Label on the microbatch axis of a value that is whole, after the loop."""


@dataclass(frozen=True)
class MicrobatchPlacement:
    """reads, makes: labels of the inputs and outputs of every operation. share: fraction of the work, by price, in the loop;
    whole: operations outside the loop although they depend on rows, the most expensive first."""

    microbatches: int
    reads: tuple[tuple[str, ...], ...]
    makes: tuple[tuple[str, ...], ...]
    share: float
    whole: tuple[str, ...]


@dataclass(frozen=True)
class LossChunking:
    """Chunks of the loss of one graph. count: their number; 1 computes it at once. head: the call that makes the logits, ""
    where it is at once. reason: why it is at once."""

    count: int = 1
    head: str = ""
    reason: str = ""
