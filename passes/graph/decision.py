"""What was decided, in the words of the rewrite: layouts of operations, and the route of every value to its readers."""
from __future__ import annotations

from dataclasses import dataclass, field

from passes.graph.layouts import Layout
from passes.graph.step_phase import Phase
from passes.hardware.axis import Axes
from passes.json_records import FrozenMap


@dataclass(frozen=True)
class OperationLayouts:
    """Layouts of one operation: what it reads, what it makes, and that after reductions at once."""

    inputs: tuple[Layout, ...]
    made: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True)
class Hop:
    """One change of the layout of a value, and when it is done."""

    layout: Layout
    phase: Phase


@dataclass(frozen=True)
class Route:
    """Layouts that a value passes on its way from where it is made (or stored) to one reader, source excluded."""

    value: int
    source: Layout
    hops: tuple[Hop, ...] = ()

    @property
    def target(self) -> Layout:
        return self.layout(len(self.hops))

    def layout(self, after: int) -> Layout:
        """The layout after that many hops."""
        return self.hops[after - 1].layout if after else self.source


@dataclass(frozen=True)
class RouteSegment:
    """The part of a route that is paid for by itself: the hops from `start` up to `stop`, which is where the route ends.

    gradient: its end is the gradient that the optimizer takes, so that its reductions go into buckets. held: its end is a
    parameter that the runtime holds.
    """

    route: Route
    start: int
    stop: int
    gradient: bool = False
    held: bool = False


@dataclass(frozen=True, repr=False)
class Decision:
    """`axes`: those that layouts are over. Keys are indices into the `PlacementGraph`."""

    axes: Axes
    inputs: FrozenMap[int, Layout]
    """Graph input -> layout in which the runtime hands it in."""
    operations: FrozenMap[int, OperationLayouts]
    routes: FrozenMap[tuple[int, int], Route]
    """(operation, operand position) -> route."""
    outputs: tuple[Route, ...]
    """Route of every output of the graph, in order."""
    copies: FrozenMap[tuple[int, Phase], Layout] = field(default_factory=FrozenMap)
    """(value, phase) -> layout of the copy of which several readers make theirs."""
    held: FrozenMap[int, Route] = field(default_factory=FrozenMap)
    """Parameter -> the way from where it is stored to how the runtime hands it in, where that is not the same: it is gone once
    a step, before the first call of the graph, and the end is held until the optimizer changes the parameter."""

    def stored(self, parameter: int) -> Layout:
        """Where a parameter lies between steps, with its gradient and its optimizer state."""
        return self.held[parameter].source if parameter in self.held else self.inputs[parameter]

    def __repr__(self) -> str:
        return f"Decision({dict((axis.name, axis.size) for axis in self.axes)}, {len(self.operations)} operations)"
