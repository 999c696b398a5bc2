"""Inputs of one Dynamo graph as its plan sees them: which can be placed, which are placed already, and which are gathered."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule

from hpml_compiler.compile.inputs.moved_parameters import share_memory
from hpml_compiler.compile.inputs.pp_mesh import over_stage
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import axes_of_stage, has_stages, same_mesh
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.install.parameter_sharding import placeable
from hpml_compiler.runtime.install.unwrap_inputs import InputPlacement, copy_for_set_data, take_out_markers
from hpml_compiler.runtime.process.world_group import world_size
from hpml_compiler.runtime.weights.loaded_parameters import loaded_alike
from hpml_compiler.session import session
from passes import compat
from passes.errors import BadInput
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_signature import GraphInput, graph_inputs, inputs_in_outputs, parameter_name
from passes.hardware.axis import Axes, device_axes
from passes.sharding.graph_boundary import fitting_shards, inputs_that_do_not_fit


def sizes_are_numbers(gm: GraphModule, values: Sequence[Any]) -> None:
    """Guard on all sizes: a decision holds for one batch size, and another size compiles another graph."""
    for value in values:
        guard_on_sizes(value)
    for number in compat.ints_of_sizes(gm):
        int(number)  # a guard, as for sizes; other integers, such as a place in a queue, may differ from call to call


def guard_on_rows(gm: GraphModule) -> None:
    """Guard on the local sizes of a batch that is sharded by rows: Dynamo guards on nothing else of it."""
    for node in gm.graph.find_nodes(op="placeholder"):
        guard_on_sizes(getattr(node.meta["example_value"], "_local_tensor", None))


def guard_on_sizes(value: Any) -> None:
    if isinstance(value, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape):
        for size in (*value.shape, *value.stride()):
            int(size)  # a guard: Dynamo recompiles for another size


class GraphInputs:
    """`described`: the inputs in order, for planning. `examples`: full plain tensors to trace with.

    `rows`: positions of inputs that are rows of a batch. `gathered`: of placed inputs that each call gathers. `written`: of
    inputs that the graph mutates. `moved`: new placements of parameters that were placed otherwise, by position. `mesh`: axes
    that this graph has to share, if any: those of its placed parameters, or those of the graphs before it. In a pipeline, the
    axes of one stage.
    """

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options) -> None:
        self._given, self._options = given, options
        self.rows: set[int] = set()
        self.gathered: set[int] = set()
        self.written: set[int] = set()
        self.moved: dict[int, tuple[Placement, ...]] = {}
        copy_for_set_data(gm)
        gm, self.examples, placed = take_out_markers(gm, given)
        sources = compat.input_sources(gm)
        self._placed_on = session.current().mesh
        for position, placement in placed.items():
            if isinstance(given[position], torch.nn.Parameter):
                name = parameter_name(sources[position])
                self._placed_on = self._shared(session.current().adopt(placement.mesh, name), name, options)
                break
            if placement.output and self._placed_on is None:
                self._placed_on = session.current().adopt(placement.mesh, parameter_name(sources[position]))
        self.mesh = self._placed_on if not has_stages(self._placed_on) else axes_of_stage(self._placed_on or {})
        can_be_placed = None if world_size() == 1 else placeable(gm, given) if torch.is_grad_enabled() else ()
        self.described = graph_inputs(gm, self.examples, can_be_placed)
        for position, placement in placed.items():
            self.described[position] = self._placed(position, self.described[position], placement,
                                                    self.examples[position].shape, options)

    def _placed(self, position: int, described: GraphInput, placement: InputPlacement, shape: Sequence[int],
                options: Options) -> GraphInput:
        """An input that is placed already: planned as it is placed, or gathered at each call."""
        if placement.rows:
            self.rows.add(position)
            return described
        axes = self._placed_on
        if placement.output and (placement.whole or options.stage_ranks > 1 or has_stages(axes)):
            self.gathered.add(position)
            return described
        bound = described.kind == "parameter" or (options.mesh is None or same_mesh(options.mesh, axes))
        mesh = session.current().device_mesh(axes) if axes is not None and bound else None
        if axes is not None and placement.can_be_planned(shape, mesh):
            stored = over_stage(session.from_dtensor(placement.placements), axes) if has_stages(axes) else (
                session.from_dtensor(placement.placements))
            if stored is not None:
                return replace(described, kind=described.kind if placement.output else "parameter", stored=stored)
        self.gathered.add(position)
        return described

    def _shared(self, placed_on: dict[str, int], name: str, options: Options) -> dict[str, int] | None:
        """Axes that parameters are placed on, if this graph can be planned on them. A graph without stages gathers parameters
        that the stages of a pipeline share."""
        if options.stage_ranks > 1 and not same_mesh(options.mesh or {}, placed_on):
            raise BadInput(f"the parameter is already placed on the mesh {placed_on}, but the options request {options.mesh}",
                           f"parameter {name}", "use the same mesh in all torch.compile calls of a model")
        return placed_on if options.stage_ranks > 1 or not has_stages(placed_on) else None

    def take_rows_whole(self) -> None:
        self.gathered |= self.rows
        self.rows.clear()

    def annotate(self, gm: GraphModule, forward_outputs: int | None, microbatches: int = 1,
                 leaves: bool = True) -> AnalyzedGraph:
        """Analyze the traced graph for planning; finds inputs that have to be gathered on the way. microbatches: per step.
        leaves: whether results besides the loss may stay sharded."""
        from passes.presets import annotate  # here: graphs from the graph cache are planned already

        if forward_outputs is None:  # nothing is trained here, and only training places parameters
            self.described = [replace(described, placeable=False) for described in self.described]
        self.written = compat.mutated_inputs(gm)
        for position in self.written | inputs_in_outputs(gm, forward_outputs):
            self._take_whole(position)
        compiler = self._options.compiler
        annotated = annotate(gm, self.described, forward_outputs, microbatches, leaves, compiler)
        mesh, world = device_axes(self.mesh or {}), device_axes({"world": world_size()})
        views = list(inputs_that_do_not_fit(annotated, mesh, self.rows, world))
        if self.rows and self._rows_may_be_unequal(annotated.graph.rows):
            views += sorted(self.rows - {*views})
        for position in views:
            if forward_outputs is None or not self._shards_again(annotated, position, mesh):
                self._take_whole(position)
        return annotate(gm, self.described, forward_outputs, microbatches, leaves, compiler) if views else annotated

    def _shards_again(self, annotated: AnalyzedGraph, position: int, mesh: Axes) -> bool:
        """True if a trained parameter is sharded along another factor of its dims from now on: its shards, as it was loaded, do
        not fit a view of it."""
        described, given = self.described[position], self._given[position]
        if described.kind != "parameter" or position in self.rows or has_stages(self._placed_on) or not (
                isinstance(given, torch.nn.Parameter) and isinstance(given, PlacedTensor)):
            return False
        layout = fitting_shards(annotated, position, mesh)
        if layout is None or share_memory(loaded_alike(described.name, given)):
            return False
        self.described[position] = replace(described, stored=layout)
        self.moved[position] = session.to_dtensor(layout)
        return True

    def _rows_may_be_unequal(self, rows: int) -> bool:
        """True if ranks may compute other numbers of rows than they store of a distributed batch."""
        weights = self._options.row_weights
        return weights is not None and (bool(weights) or rows % world_size() > 0)

    def _take_whole(self, position: int) -> None:
        """Gather an input: the graph mutates it and returns the full new value, or returns a view of it, which AOTAutograd
        replays on the argument, or its shards do not fit a view that the graph takes of it."""
        described = self.described[position]
        self.moved.pop(position, None)
        if described.stored is not None or position in self.rows:
            self.gathered.add(position)
            self.rows.discard(position)
        self.described[position] = replace(described, placeable=False, stored=None)

    def only_read(self, annotated: AnalyzedGraph) -> list[str]:
        """Placeholders that the graph only reads: they have no gradient and are not mutated."""
        return [name for name, position in annotated.interface.positions.items()
                if position not in self.written and not self.described[position].trainable]

    def kept_gradients(self, annotated: AnalyzedGraph, forward_outputs: int | None) -> list[int]:
        """Positions of the gradients of leaves among the outputs of the joint graph: those that go to `.grad`."""
        if forward_outputs is None:
            return []
        values = [self._given[position] for position in annotated.interface.positions.values()]
        return [forward_outputs + k for k, value in enumerate(values)
                if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf]
