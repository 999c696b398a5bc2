"""Boundaries between the graphs of a step: outputs that stay sharded, and the next graphs that take them as they are."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpml_compiler.planner.graph.microbatching import joint_of_loss
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.graph_copy import copy_graph
from passes.graph.layouts import StoredLayout, stored_layout
from passes.hardware.axis import device_axes
from passes.presets import annotate
from passes.sharding.graph_boundary import inputs_that_do_not_fit, left_sharded
from passes.tracing.joint_trace import JointTrace


class GraphBoundaries:
    """The outputs that planned graphs of a step leave sharded. compiler: that the graphs were traced for."""

    def __init__(self, compiler: str) -> None:
        self._compiler = compiler
        self._left: dict[tuple[str, int], StoredLayout] = {}

    def note(self, graph: str, annotated: AnalyzedGraph, decision: Decision) -> None:
        """Record the outputs of a planned graph."""
        for each, layout in left_sharded(annotated, decision):
            value = annotated.graph.values[annotated.graph.outputs[each.number][0]]
            self._left[graph, each.position] = stored_layout(value, layout)

    def arriving(self, traced: JointTrace, annotated: AnalyzedGraph, mesh: Mapping[str, int], microbatches: int,
                 ) -> tuple[JointTrace, AnalyzedGraph]:
        """The next graph with the placements that its inputs arrive in, analyzed for planning again where there are any.
        microbatches: that it was analyzed for."""
        stored = {k: self._left.get((f"graph_{graph}", place)) for k, (graph, place) in traced.received.items()}
        if not any(stored.values()):
            return traced, annotated
        inputs = [replace(x, stored=stored.get(k)) for k, x in enumerate(traced.inputs)]
        gm = copy_graph(traced.gm) if microbatches == 1 else joint_of_loss(traced.gm)
        analyzed = annotate(gm, inputs, traced.forward_outputs, microbatches, compiler=self._compiler)
        misfits = set(inputs_that_do_not_fit(analyzed, device_axes(mesh)))
        if misfits:
            inputs = [replace(x, stored=None) if k in misfits else x for k, x in enumerate(inputs)]
            analyzed = annotate(gm, inputs, traced.forward_outputs, microbatches, compiler=self._compiler)
        return replace(traced, inputs=inputs), analyzed
