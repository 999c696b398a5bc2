"""Program of one rank for one step, as data: a prologue and an epilogue around a loop over microbatches, whose body is one
stage, or the stages of a pipeline that this rank runs. The graph cache stores it.

It has graphs that are ready to be compiled, names, and fakes. The graph that it was cut out of is not needed any more.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.lower.lowering import values_of
from hpml_compiler.compile.program.lowered_stages import StageProgram
from hpml_compiler.compile.program.rerun import rerun_state_of, saved_for_rerun
from hpml_compiler.planner.checkpointing.checkpointed_halves import cut_as_kept
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.planner.pipeline.stage_halves import StageHalves, half_of
from hpml_compiler.runtime.program.fused_forward_backward import RerunState
from hpml_compiler.runtime.program.microbatch_loop import saved_for_backward
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.fx_nodes import returned_nodes
from passes.graph.loops.loop_parts import LoopInput, LoopSplit, PrologueEpilogue
from passes.transforms.pipeline.stage_graphs import StageIO


@dataclass(frozen=True)
class StepInterface:
    """Inputs and results of a graph and of its microbatch loop. inputs, results: fakes of the inputs, by name, and of the
    results, of which the first `forward_outputs` are forward's. loss: name of the loss's tangent, if the loss is inside; rerun:
    state for rerunning the step, in that case. saved: fakes of the values that forward saves for backward."""

    microbatches: int
    forward_outputs: int
    inputs: Mapping[str, Any]
    results: tuple[Any, ...]
    loop: PrologueEpilogue
    loss: str | None
    rerun: RerunState | None
    saved: tuple[Any, ...]

    @staticmethod
    def of(marked: GraphModule, loop: PrologueEpilogue, microbatches: int, forward_outputs: int, written: Container[int],
           others: bool, in_loop: list[Any]) -> StepInterface:
        """marked: the graph that the loop was cut out of. written: positions of inputs that the model mutates. others: whether
        gradients may arrive at other outputs than the loss. in_loop: fakes of the values that the loop's forward saves for its
        backward, if all of forward runs first."""
        values = {node.name: node.meta.get("val") for node in marked.graph.nodes}
        results = tuple(None if node is None else node.meta["val"] for node in returned_nodes(marked))
        loss = loss_of(marked)
        again = rerun_state_of(marked, loss, written, others)
        if loss is None:
            saved = [*(values[name] for name in saved_for_backward(loop, forward_outputs)), *in_loop]
        else:
            gradients = (x for x in results[forward_outputs:] if x is not None)
            saved = [*gradients, values[loss], *saved_for_rerun(marked, again)]
        return StepInterface(microbatches, forward_outputs, {name: values[name] for name in loop.inputs}, results, loop, loss,
                             again,
                             tuple(saved))


@dataclass(frozen=True)
class PipelineLinks:
    """Connections of a rank's stages with other ranks. reads, outputs, gradients: see `StagedBody`. alone, elsewhere, lent: see
    `runtime.program.pipeline_step.PipelineLoop`."""

    reads: Mapping[str, LoopInput]
    outputs: Mapping[int, int]
    gradients: Mapping[int, tuple[int, ...]]
    alone: frozenset[int]
    elsewhere: Mapping[str, torch.Tensor]
    lent: Mapping[str, tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class StepProgram:
    """parts: inputs and results, and the graphs around the loop. stages: the loop's body. links: None without a pipeline, whose
    body is one stage. counted: whether a memory budget decided about the body, so that compiled code may use no more memory
    than was counted."""

    parts: StepInterface
    stages: tuple[StageProgram, ...]
    links: PipelineLinks | None = None
    counted: bool = False

    def __str__(self) -> str:
        halves = (each.halves for each in self.stages)
        body = ", ".join(f"stage {each.ends.index}: " + " + ".join(
            f"{len(half.gm.graph.nodes)} nodes" for half in (own.forward, own.backward, own.weight) if half is not None)
            for each, own in zip(self.stages, halves))
        around = {f"{when} {half}": segment.gm for when in ("before", "after")
                  for half, segment in zip(("forward", "backward"), getattr(self.parts.loop, when))}
        return f"{self.parts.microbatches} x ({body}); " + ", ".join(
            f"{name}: {len(gm.graph.nodes)} nodes" for name, gm in around.items() if gm is not None)


def one_stage_program(marked: GraphModule, loop: LoopSplit, microbatches: int, forward_outputs: int, written: Container[int],
                      others: bool, step_us: float, kept: CheckpointDecision | None = None, folder: str = "") -> StepProgram:
    """The program of a loop without a pipeline; see `StepInterface.of`. step_us: predicted time of the step. kept:
    checkpointing decision of the loop body under a budget. folder: for offloaded values."""
    body, outputs = loop.body, len(loop.forward)
    taken = tuple(node.name for node in body.graph.find_nodes(op="placeholder"))
    if kept is None:
        # The partition that saves least, with either compiler: microbatches are there to reduce saved values.
        forward, backward = compat.min_cut_partition(body, values_of(body), outputs, None)
    else:
        forward, backward = cut_as_kept(body, kept, outputs, folder)
    saved = {node.name: node.meta["val"] for node in returned_nodes(forward)[outputs:] if node is not None}
    parts = StepInterface.of(marked, loop.around(), microbatches, forward_outputs, written, others,
                             [*saved.values()] * microbatches)
    ends = StageIO(0, taken, (), (), (), (), tuple(range(outputs)), tuple(range(len(loop.backward))), (), (), (), (), {})
    halves = StageHalves(half_of(forward), half_of(backward), None, saved)
    stage = StageProgram(ends, halves, frozenset(), step_us / microbatches)  # a half is called for each microbatch
    return StepProgram(parts, (stage,), counted=kept is not None)
