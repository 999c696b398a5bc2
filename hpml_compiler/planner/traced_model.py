"""Trace a model once, in full or as a few of its equal layers, and plan it on clusters of equal devices."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from hpml_compiler.option_values import equal_ranks
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.few_layer_trace import (
    LONG,
    SHORT,
    FewLayerTrace,
    depth,
    neighbors,
    repeated_paths,
    with_few_layers,
)
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.graph.microbatching import joint_of_loss
from hpml_compiler.planner.step_decision import decomposes_loss, defers_outputs
from hpml_compiler.planner.traced_passes import change_traced
from hpml_compiler.plans.from_decision.graph_record import SHORTENED
from passes.analyses.microbatch_dims import fitting_microbatches
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_copy import copy_graph
from passes.graph.graph_signature import input_position
from passes.presets import annotate
from passes.sharding.grouping.layer_removal import without_layers
from passes.tracing.joint_trace import JointTrace, trace
from passes.tracing.untraced_parts import UntracedPart
from passes.transforms.loss_chunks.chunk_loss import Chunks
from passes.transforms.loss_chunks.chunk_notes import noting_chunks
from passes.transforms.outputs.outputs_beside_loss import detach_results, outputs_beside_loss
from passes.transforms.outputs.split_outputs import copied_bytes, split_outputs

log = logging.getLogger("hpml")
ALL_LAYERS = 0
"""Key of the full model among known traces."""
Known = dict[tuple[int, Chunks, bool], list[JointTrace]]


class TracedModel:
    """A model that is traced on one batch when first needed, and then planned on one cluster after another. alone: trace it as
    for one device. run_breaks: run the Python code between graphs, on the real weights and batch. known: traces by number of
    layers, the chunks in which they compute the loss, and whether they leave out large outputs, which plans with other options
    share; None if this one may change its own."""

    def __init__(self, model: nn.Module, batch: Any, options: Options, alone: bool = False, run_breaks: bool = False,
                 known: Known | None = None):
        self.model, self.batch, self.options, self.alone, self.run_breaks = model, batch, options, alone, run_breaks
        self.known, self._splits, self._copied = known, False, 0.0
        self.unplanned: list[UntracedPart] = []
        """Filled when the full model is traced."""

    def with_options(self, options: Options) -> TracedModel:
        """The same model for other options that trace it alike; it is traced once, if this one has `known` traces."""
        other = TracedModel(self.model, self.batch, options, self.alone, self.run_breaks, self.known)
        other.unplanned = self.unplanned
        return other

    @cached_property
    def traced(self) -> list[JointTrace]:
        """All graphs of the full model, under a budget before any pass of hpml's own."""
        alone = self.alone and not decomposes_loss(self.options)
        return self._known(ALL_LAYERS, lambda: trace(self.model, self.batch, self.options.compiler, alone, self.run_breaks,
                                                     self.unplanned, self._defer))

    def _defer(self, gm: GraphModule) -> GraphModule | None:
        split = split_outputs(gm) if defers_outputs(self.options) else None
        self._splits |= split is not None
        self._copied += copied_bytes(gm)
        beside = outputs_beside_loss(gm)
        whole = copy_graph(gm) if split is None and beside else None
        detach_results(gm, beside)
        return whole if split is None else split.whole

    @cached_property
    def whole(self) -> list[AnalyzedGraph]:
        """All graphs, analyzed for planning."""
        return [self._annotated(each) for each in self.traced]

    @property
    def sharing(self) -> StepContext | None:
        """The memory that a graph of a run shares with others."""
        return None

    @property
    def quick(self) -> CachedMeasurements | None:
        """The quick profile of the devices of a run, by which its placements are priced."""
        return None

    @property
    def trained(self) -> dict[str, float]:
        """Bytes of the trained parameters, by name."""
        return {name: float(p.numel() * p.element_size()) for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def shortened(self) -> tuple[FewLayerTrace, AnalyzedGraph] | None:
        """Four layers of a deep model, and their relation to it; None if that is not worth it."""
        layers = depth(self.model)
        by_layer = any(pattern != "*" for pattern in self.options.recompute)
        given = self.options.load_plan()
        whole = given is not None and not all(graph.graph_hash.startswith(SHORTENED) for graph in given.graphs)
        if layers is None or self.options.trace_all_layers or whole or by_layer:
            return None
        long = self._cut(LONG)
        if long is None:
            return None
        self.few, annotated = long
        short = without_layers(annotated.graph, neighbors(self.model))
        if short is None:
            log.info("the layers of the model differ too much to derive a shallower graph; hpml traces that, too")
            fewer = self._cut(SHORT)
            if fewer is None:
                return None
            short, seconds = fewer[1].graph, fewer[1].seconds
            annotated.seconds = {k: annotated.seconds[k] + seconds[k] for k in seconds}
        names = tuple(name for name, _ in self.model.named_parameters())
        return FewLayerTrace(short, tuple(repeated_paths(self.model)), layers, names), annotated

    def _cut(self, layers: int) -> tuple[JointTrace, AnalyzedGraph] | None:
        """Trace the model with so many layers, under a budget also before any pass; None if that gives several graphs, or not
        all of it."""
        with with_few_layers(self.model, layers):
            found = self._known(layers, self._trace_whole)
        return (found[0], self._annotated(found[0])) if len(found) == 1 and not found[0].breaks else None

    def _trace_whole(self) -> list[JointTrace]:
        """Trace the model as it is; no graphs where tracing does not reach all of it."""
        rest: list[UntracedPart] = []
        found = trace(self.model, self.batch, self.options.compiler, unplanned=rest, defer=self._defer)
        return [] if rest else found

    def _known(self, layers: int, find: Callable[[], list[JointTrace]]) -> list[JointTrace]:
        """The traces of so many layers, after the passes that the options name."""
        chunks = self.alone and self.options.chunks != "auto"
        looped = self.options.chunks if chunks and self.options.microbatches == 1 else 1
        defers = defers_outputs(self.options)
        if self.known is not None and (layers, looped, defers) in self.known:
            return self.known[layers, looped, defers]
        self._splits, self._copied = False, 0.0
        found = find()
        found[-1:] = [replace(each, copied=self._copied) for each in found[-1:]]  # it has the loss
        for k, each in enumerate(found):
            with noting_chunks() as notes:
                change_traced(each.gm, each.forward_outputs, self.options, chunks)
            found[k] = replace(each, loss_chunks=notes[-1] if notes else None)
        if self.known is not None:
            same = (defers,) if self._splits or not defers else (True, False)
            self.known |= {(layers, looped, each): found for each in same}
        return found

    def _annotated(self, traced: JointTrace) -> AnalyzedGraph:
        stays = self.options.chooses_saved or self.known is not None
        return _annotate(replace(traced, gm=copy_graph(traced.gm)) if stays else traced, self.options)


def _annotate(traced: JointTrace, options: Options) -> AnalyzedGraph:
    count = 1
    if options.microbatches > 1:
        traced = replace(traced, gm=joint_of_loss(traced.gm))
        count = fitting_rows(traced, options)
    annotated = annotate(traced.gm, traced.inputs, traced.forward_outputs, count, options.shards_outputs,
                         options.compiler)
    annotated.seconds["trace"] = traced.seconds
    return annotated


def fitting_rows(traced: JointTrace, options: Options) -> int:
    """Number of microbatches for its rows."""
    return fitting_microbatches(_shapes_of_batch(traced), options.microbatches, equal_ranks(options))


def _shapes_of_batch(traced: JointTrace) -> list[torch.Size]:
    """Shapes of the inputs of the joint graph that are data."""
    given = [node for node in traced.gm.graph.find_nodes(op="placeholder") if not node.name.startswith("tangents")]
    return [node.meta["val"].shape for order, node in enumerate(given) if isinstance(node.meta.get("val"), torch.Tensor)
            and traced.inputs[input_position(node, order)].kind == "batch"]


def microbatches_of(annotated: AnalyzedGraph) -> int:
    """Number of microbatches that a graph was analyzed for."""
    return next((value.factors[dim][factor] for value in annotated.graph.values for dim, factor in value.microbatch), 1)
