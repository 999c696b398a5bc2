"""Regional compilation: a graph runs as a list of segments, and equal segments share compiled code."""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from hpml_compiler.plans.schema import BlocksReport
from passes.graph.fx_nodes import on_cpus, returned_nodes
from passes.transforms.regional.graph_segments import GraphSegment, cut_segments

log = logging.getLogger("hpml")

Call = Callable[[list[Any]], Any]
LEAST_SAVED = 0.5
"""Minimum share of a graph's calls that must need no compilation of their own, for segments to be worth their call overhead."""
CALL_US = 15.0
"""Overhead of a segment besides its kernels. Measured: 11 µs, on a core that does some 2500 µs of 48 segments' work."""
MOST_LOST = 0.005
"""Largest share of a step that the calls of one half's segments may take under "auto"."""


@dataclass(frozen=True)
class _SegmentCall:
    """One call of a segment: reads the slots `takes`, of which `last` are not read again, and writes the slots `gives`."""

    call: Call
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class RegionalCall:
    """The segments of a graph in which enough segments are equal."""

    gm: GraphModule
    segments: tuple[GraphSegment, ...]
    classes: dict[Hashable, GraphSegment]
    """One segment of each class, by key."""

    @staticmethod
    def of(gm: GraphModule, donated: Collection[int] = ()) -> RegionalCall | None:
        """Reorders a graph's calls; None where too little of the graph repeats. donated: see `cut_segments`."""
        segments = cut_segments(gm, donated)
        if segments is None:
            return None
        classes: dict[Hashable, GraphSegment] = {}
        for segment in segments:
            classes.setdefault(segment.key, segment)
        found = RegionalCall(gm, segments, classes)
        return found if found.report.compiled <= (1 - LEAST_SAVED) * found.report.calls else None

    @property
    def report(self) -> BlocksReport:
        return BlocksReport(
            segments=len(self.segments), different=len(self.classes), calls=sum(len(each.nodes) for each in self.segments),
            compiled=sum(len(each.nodes) for each in self.classes.values()))

    def costs_little(self, step_us: float) -> bool:
        """True if the overhead of these calls is negligible in a step of so many µs, on CPUs. On a GPU, which idles when its
        host is late, it has not been measured."""
        return on_cpus(self.gm) and len(self.segments) * CALL_US <= MOST_LOST * step_us

    def parts(self) -> dict[Hashable, GraphSegment]:
        """Segments to compile, by key."""
        return {key: segment for key, segment in self.classes.items() if not segment.alone}

    def run(self, made: Mapping[Hashable, Call]) -> Call:
        """Callable that runs the graph. made: the compiled `parts`."""
        alone = {key: _alone(segment) for key, segment in self.classes.items() if segment.alone}
        calls = {**alone, **made}
        return _run(self.gm, self.segments, [calls[segment.key] for segment in self.segments])


def _alone(segment: GraphSegment) -> Call:
    """Callable of a segment that is one call and is not compiled."""
    (node,) = segment.nodes
    place = {x: k for k, x in enumerate(segment.takes)}

    def call(arguments: list[Any]) -> Any:
        given = tuple(arguments)
        arguments.clear()
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: given[place[x]])
        return (node.target(*args, **kwargs),)  # type: ignore[operator]  # a call's target is called

    return call


def _run(gm: GraphModule, segments: Sequence[GraphSegment], calls: Sequence[Call]) -> Call:
    inputs = gm.graph.find_nodes(op="placeholder")
    slots: dict[Node, int] = {node: k for k, node in enumerate(inputs)}
    for segment in segments:
        for node in segment.gives:
            slots[node] = len(slots)
    returned = returned_nodes(gm)
    kept, steps = {node for node in returned if node is not None}, []
    for segment, call in zip(reversed(segments), reversed(calls), strict=True):
        last = tuple(slots[node] for node in segment.takes if node not in kept)
        kept |= set(segment.takes)
        steps.append(_SegmentCall(call, _places(slots, segment.takes), _places(slots, segment.gives), last))
    steps.reverse()
    results = [None if node is None else slots[node] for node in returned]
    more, unread = len(slots) - len(inputs), tuple(slots[node] for node in inputs if node not in kept)

    def run(arguments: list[Any]) -> Any:
        values = [*arguments, *(None,) * more]
        arguments.clear()
        for k in unread:
            values[k] = None
        for step in steps:
            taken = [values[k] for k in step.takes]
            for k in step.last:
                values[k] = None
            for k, value in zip(step.gives, step.call(taken)):
                values[k] = value
        return [None if k is None else values[k] for k in results]

    return run


def _places(slots: dict[Node, int], nodes: Sequence[Node]) -> tuple[int, ...]:
    return tuple(slots[node] for node in nodes)
