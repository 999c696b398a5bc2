"""Microbatched step of a graph: the graphs that AOTAutograd gets, and the loop that runs instead of them.

AOTAutograd gets a forward and a backward graph of one opaque call each, with the right inputs and outputs; these are not
compiled. Instead of them runs a loop over microbatches (`hpml_compiler.runtime.program.microbatch_loop`) of the parts that the
graph was cut into, each compiled once.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.lower.compile_timer import tell
from hpml_compiler.compile.lower.lowering import lowering_of_part, mark_boxed
from hpml_compiler.compile.program.loop_program import LoopProgram, StepInterface, split_loop_body
from hpml_compiler.compile.program.rerun import compiled_rerun
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.microbatching import fitting_microbatches, loop_of
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from hpml_compiler.runtime.program.fused_forward_backward import FusedForwardBackward
from hpml_compiler.runtime.program.microbatch_loop import (
    Call,
    LoopCalls,
    MicrobatchLoop,
    SplitForwardBackward,
    numbers_first,
    numbers_last,
)
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.loops.loop_parts import GraphFragment, LoopSplit
from passes.sharding.microbatch_axis import MicrobatchPlacement
from passes.transforms.shard.redistributor import MeshGroups


def whole_schedule(*_values: Any) -> Any:
    """Placeholder for the loop, in the graphs that AOTAutograd gets."""
    raise AssertionError("graphs of a schedule are not compiled")


MakesWhole = Callable[[], "MicrobatchAutograd | None"]
Keeps = Callable[[GraphModule, LoopSplit], CheckpointDecision]


class MicrobatchAutograd(abc.ABC):
    """`partition` makes AOTAutograd's graphs; `forward` and `backward` are the callables that run. whole: makes the same step
    for gradients at all outputs; None where that is not possible. shares: see `Lowering.shares`."""

    def __init__(self, options: Options, parts: StepInterface, whole: MakesWhole | None = None, shares: bool = True):
        self.parts, again = parts, parts.again
        self.again = again if again is None or whole is None else replace(again, whole=lambda: compiled_rerun(whole))
        self.around = lowering_of_part(options.compiler, shares)
        self.reports: dict[str, BlocksReport] = {}
        """Reports of regional compilation of one microbatch's halves, once they are compiled."""
        self.runs: FusedForwardBackward | SplitForwardBackward | None = None

    def partition(self) -> tuple[GraphModule, GraphModule]:
        given, parts = self.parts.given, self.parts
        primals = [(name, fake) for name, fake in given.items() if not name.startswith("tangents")]
        tangents = [(name, fake) for name, fake in given.items() if name.startswith("tangents")]
        outputs, gradients = parts.results[:parts.forward_outputs], parts.results[parts.forward_outputs:]
        forward = _opaque(primals, [*outputs, *numbers_last(parts.saved)])
        backward = _opaque([*((f"saved_{k}", x) for k, x in enumerate(numbers_first(parts.saved))), *tangents], gradients)
        return forward, backward

    def forward(self) -> Call:
        schedule, parts = self.schedule(), self.parts
        if parts.loss is None:
            self.runs = SplitForwardBackward(schedule, parts.forward_outputs, parts.saved)
        else:
            self.runs = FusedForwardBackward(schedule, parts.forward_outputs, parts.loss, parts.saved, self.again)
        run = self.runs.forward
        return mark_boxed(lambda arguments: run(arguments))

    def backward(self) -> Call:
        assert self.runs is not None, "forward is compiled first"
        run = self.runs.backward
        return mark_boxed(lambda arguments: run(arguments))

    @abc.abstractmethod
    def schedule(self) -> MicrobatchLoop:
        """The loop, compiled."""

    def calls(self, forward: Call, backward: Call | None, saved: tuple[int, ...]) -> LoopCalls:
        """The compiled graphs around the loop, together with these for its body."""
        before, after = (tuple(map(self._segment, halves)) for halves in (self.parts.loop.before, self.parts.loop.after))
        return LoopCalls(before, forward, backward, after, saved)

    def _segment(self, segment: GraphFragment) -> Call | None:
        if segment.gm is None:
            return None
        tell("what is around its loop")
        with compat.strides_of_results():
            return self.around.inference(segment.gm)


class MicrobatchedStep(MicrobatchAutograd):
    """A step whose loop body has two halves. step_us: predicted time of the full step, for the "auto" mode of regional
    compilation."""

    def __init__(self, options: Options, cut: LoopProgram, whole: MakesWhole | None = None, step_us: float = 0.0,
                 shares: bool = True):
        super().__init__(options, cut.parts, whole, shares)
        self.cut, self.lowering = cut, lowering_of_part(options.compiler, shares, options.compile_blocks)
        self.lowering.step_us = step_us / cut.parts.microbatches  # a segment is called for each of them
        if cut.counted:
            self.lowering.count_bytes()
            self.around.count_bytes()

    def schedule(self) -> MicrobatchLoop:
        (forward, backward), loop = self.cut.halves, self.parts.loop
        made = {name: k for k, name in enumerate(self.cut.saved)}
        reads = [node.name for node in backward.graph.find_nodes(op="placeholder")][:len(made)]
        saved = tuple(made[name] for name in reads)  # forward returns tensors before numbers, backward takes numbers first
        with self.lowering.waiting_once(forward):
            run_forward, backwards = self.lowering.part(forward, {"backward": backward}, len(loop.forward))
            calls = self.calls(run_forward, backwards["backward"] if loop.backward else None, saved)
        self.reports.update(self.lowering.reports)
        return MicrobatchLoop(loop, calls, self.parts.microbatches)


def _opaque(inputs: Sequence[tuple[str, torch.Tensor]], results: Sequence[Any]) -> GraphModule:
    """A graph of one opaque call with these inputs and results."""
    graph = Graph()
    given = []
    for name, value in inputs:
        given.append(graph.placeholder(name))
        given[-1].meta["val"] = value
    call = graph.call_function(whole_schedule, tuple(given))
    call.meta["val"] = tuple(results)
    made: list[Node | None] = []
    for k, value in enumerate(results):
        if value is None:
            made.append(None)
            continue
        made.append(graph.call_function(operator.getitem, (call, k)))
        made[-1].meta["val"] = value
    graph.output(tuple(made))
    return GraphModule(torch.nn.Module(), graph)


def microbatch_count(inputs: GraphInputs, options: Options) -> int:
    """Number of microbatches of a step, if its graph allows them: as many as divide the rows that a rank has at the least."""
    if options.microbatches == 1 or not torch.is_grad_enabled():
        return 1
    shapes = [x.shape for x, its in zip(inputs.examples, inputs.described, strict=True) if its.kind == "batch"]
    ranks = world_size() if inputs.rows else (options.mesh or {}).get("dp", 1)
    return fitting_microbatches(shapes, options.microbatches, ranks, speaks=this_rank() == 0)


def compile_in_microbatches(gm: GraphModule, annotated: AnalyzedGraph, decision: Decision, times: MicrobatchPlacement,
                            groups: MeshGroups,
                            options: Options, forward_outputs: int, kept_gradients: Sequence[int],
                            whole: MakesWhole | None = None, step_us: float = 0.0,
                            keep: Keeps | None = None) -> MicrobatchedStep:
    """Compile an annotated graph, placed on devices and on the microbatch axis. whole, step_us: see `MicrobatchedStep`. keep:
    under a memory budget, builds the storage program of the loop body, and solves its checkpointing."""
    written = compat.mutated_inputs(gm)
    loop = loop_of(gm, annotated.graph, decision, times, groups, forward_outputs, kept_gradients, options.compiler)
    kept = None if keep is None else keep(gm, loop)
    cut = split_loop_body(gm, loop, times.microbatches, forward_outputs, written, whole is not None, kept,
                          options.offload_folder or "")
    return MicrobatchedStep(options, cut, whole, step_us)
