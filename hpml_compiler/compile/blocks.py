"""Equal blocks compiled once: a graph runs as a list of segments, of which equal ones are the same compiled code."""
from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from passes.graph.nodes import returned_nodes
from passes.transform.segments import Segment, cut_segments

log = logging.getLogger("hpml")

Call = Callable[[list[Any]], Any]
LEAST_SAVED = 0.5
"""Of a graph's calls, what has to be compiled already for segments to be worth their calls."""


@dataclass(frozen=True)
class _Step:
    """call takes these slots, of which `last` are not read again, and fills those."""

    call: Call
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    last: tuple[int, ...]


def in_blocks(gm: GraphModule, compile_segment: Callable[[GraphModule], Call | None]) -> Call | None:
    """What runs a graph, with each different segment compiled once; None where too little of it repeats itself, or where a
    segment cannot be compiled apart, of which `compile_segment` makes None."""
    segments = cut_segments(gm)
    if segments is None:
        return None
    classes: dict[Hashable, Segment] = {}
    for segment in segments:
        classes.setdefault(segment.key, segment)
    calls = sum(len(segment.nodes) for segment in segments)
    compiled_once = sum(len(segment.nodes) for segment in classes.values())
    if 1 - compiled_once / calls < LEAST_SAVED:
        return None
    made: dict[Hashable, Call] = {}
    for key, segment in classes.items():
        call = _alone(segment) if segment.alone else compile_segment(segment.graph(gm))
        if call is None:
            log.info("Blocks of a graph are not compiled apart: one of them has results of other strides than were traced")
            return None
        made[key] = call
    log.info("%d of %d calls of a graph are compiled, in %d segments of which %d differ", compiled_once, calls, len(segments),
             len(classes))
    return _run(gm, segments, [made[segment.key] for segment in segments])


def _alone(segment: Segment) -> Call:
    """A call that nothing is compiled of."""
    (node,) = segment.nodes
    place = {x: k for k, x in enumerate(segment.takes)}

    def call(arguments: list[Any]) -> Any:
        given = tuple(arguments)
        arguments.clear()
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: given[place[x]])
        return (node.target(*args, **kwargs),)  # type: ignore[operator]  # a call's target is called

    return call


def _run(gm: GraphModule, segments: Sequence[Segment], calls: Sequence[Call]) -> Call:
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
        steps.append(_Step(call, _places(slots, segment.takes), _places(slots, segment.gives), last))
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
