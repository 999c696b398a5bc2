"""Boundary of a graph: outputs that it leaves sharded, and inputs that arrive sharded (parameters in a recompile, rows of a
batch, outputs of other graphs)."""
from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.graph_signature import ShardableOutput
from passes.graph.layouts import Layout, StoredLayout, as_layout, legal
from passes.hardware.axis import Axes
from passes.op_rules.base import REPLICATE


def left_sharded(annotated: AnalyzedGraph, decision: Decision) -> Iterator[tuple[ShardableOutput, Layout]]:
    """Outputs of a graph that stay sharded under a decision, with their layouts."""
    for each in annotated.interface.unread:
        layout = decision.outputs[each.number].target
        if any(p != REPLICATE for p in layout):
            yield each, layout


def inputs_that_do_not_fit(annotated: AnalyzedGraph, axes: Axes, rows: Container[int] = (), ranks: Axes = ()) -> Iterator[int]:
    """Positions of inputs whose shards do not fit a view that the graph takes of them: 18 rows in 2 shards, viewed as 3 times
    6. rows: positions of inputs that are sharded by rows over all `ranks`; others are stored on `axes`."""
    interface = annotated.interface
    for value in annotated.graph.values:
        if value.producer is not None or value.name not in interface.positions:
            continue
        position = interface.positions[value.name]
        by_rows: Sequence = ((0, 1),)
        stored, over = (by_rows, ranks) if position in rows else (interface.stored.get(value.name), axes)
        if stored is None:
            continue
        layout = as_layout(value, tuple(stored))
        if layout is None or not legal(value, layout, over):
            yield position


def fitting_shards(annotated: AnalyzedGraph, position: int, axes: Axes) -> StoredLayout | None:
    """The layout of an input whose even shards do not fit a view that the graph takes of it, with the first inner factor of
    each dim sharded that fits; None if there is none."""
    interface = annotated.interface
    value = next(each for each in annotated.graph.values if interface.positions.get(each.name) == position)
    stored = interface.stored.get(value.name, ())
    for number in range(1, max(map(len, value.factors), default=0)):
        inner: StoredLayout = tuple((p[0], math.prod(value.factors[p[0]][:number])) if isinstance(p, tuple) and p[1] == 1 else p
                                    for p in stored)
        layout = as_layout(value, inner)
        if inner != stored and layout is not None and legal(value, layout, axes):
            return inner
    return None
