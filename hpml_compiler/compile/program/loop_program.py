"""Microbatched step of a graph, cut into the parts that are compiled; the graph cache stores it.

It is plain data: graphs that are ready to be compiled, names, and fakes. The graph that it was cut out of is not needed any
more.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.lower.halves import cut_as_kept
from hpml_compiler.compile.lower.lowering import values_of
from hpml_compiler.compile.program.rerun import rerun_state_of, saved_for_rerun
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.runtime.program.fused_forward_backward import RerunState
from hpml_compiler.runtime.program.microbatch_loop import saved_for_backward
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.fx_nodes import returned_nodes
from passes.graph.loops.loop_parts import LoopSplit, PrologueEpilogue


@dataclass(frozen=True)
class StepInterface:
    """Inputs and results of a graph and of its microbatch loop. given, results: fakes of the inputs, by name, and of the
    results, of which the first `forward_outputs` are forward's. loss: name of the loss's tangent, if the loss is inside; again:
    state for rerunning the step, in that case. saved: fakes of the values that forward saves for backward."""

    microbatches: int
    forward_outputs: int
    given: Mapping[str, Any]
    results: tuple[Any, ...]
    loop: PrologueEpilogue
    loss: str | None
    again: RerunState | None
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
        return StepInterface(microbatches, forward_outputs, {name: values[name] for name in loop.given}, results, loop, loss,
                             again,
                             tuple(saved))


@dataclass(frozen=True)
class LoopProgram:
    """halves: forward and backward of one microbatch. saved: names of the values that forward saves for backward, in its order.
    counted: whether a memory budget decided these, so that compiled code may use no more memory than was counted."""

    parts: StepInterface
    halves: tuple[GraphModule, GraphModule]
    saved: tuple[str, ...]
    counted: bool = False


def split_loop_body(marked: GraphModule, loop: LoopSplit, microbatches: int, forward_outputs: int, written: Container[int],
                    others: bool, kept: CheckpointDecision | None = None, folder: str = "") -> LoopProgram:
    """See `StepInterface.of`. kept: checkpointing decision of the loop body under a budget. folder: for offloaded values."""
    if kept is None:
        # The partition that saves least, with either compiler: microbatches are there to reduce saved values.
        halves = compat.min_cut_partition(loop.body, values_of(loop.body), len(loop.forward), None)
    else:
        halves = cut_as_kept(loop.body, kept, len(loop.forward), folder)
    saved = [node for node in returned_nodes(halves[0])[len(loop.forward):] if node is not None]
    parts = StepInterface.of(marked, loop.around(), microbatches, forward_outputs, written, others,
                             [node.meta["val"] for node in saved] * microbatches)
    # By name, since lowering may replace the nodes.
    return LoopProgram(parts, halves, tuple(node.name for node in saved), kept is not None)
