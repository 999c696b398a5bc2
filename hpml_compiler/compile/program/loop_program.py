"""A graph that goes through its batch in microbatches, cut into the parts that run: what is kept for the next launch.

It is data alone: graphs that are ready to be compiled, names, and fakes. Nothing of the graph that it was cut out of is needed
any more.
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
from passes.presets import around_loop


@dataclass(frozen=True)
class StepInterface:
    """What goes in and out of a graph and around its loop. given, results: fakes of what it takes, by name, and returns, of
    which so many are forward's. loss: name of the loss's tangent, if the loss is inside; again: what running the step once more
    takes, then. saved: fakes of what goes from forward to backward."""

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
        """marked: the graph that the loop was cut out of. written: positions of inputs that the model changes in place. others:
        whether gradients may arrive at other outputs than the loss. in_loop: fakes of what the loop's forward hands to its
        backward, if all of that runs first."""
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
    """halves: forward and backward of one microbatch. saved: names of what the first hands to the second, in its order.
    counted: whether a budget decided what that is, so that compiled code may hold no more than was counted."""

    parts: StepInterface
    halves: tuple[GraphModule, GraphModule]
    saved: tuple[str, ...]
    counted: bool = False


def split_loop_body(marked: GraphModule, loop: LoopSplit, microbatches: int, forward_outputs: int, written: Container[int],
                    others: bool, kept: CheckpointDecision | None = None, folder: str = "") -> LoopProgram:
    """See `StepInterface.of`. kept: what a budget saves of the body, which has its tape. folder: for what is offloaded."""
    if kept is None:
        # The one that saves little, with either compiler: saved values are what microbatches are for.
        halves = compat.min_cut_partition(loop.body, values_of(loop.body), len(loop.forward), None)
    else:
        halves = cut_as_kept(loop.body, kept, len(loop.forward), folder)
    saved = [node for node in returned_nodes(halves[0])[len(loop.forward):] if node is not None]
    parts = StepInterface.of(marked, loop.around(), microbatches, forward_outputs, written, others,
                             [node.meta["val"] for node in saved] * microbatches)
    # By names, since lowering may put other nodes in their places.
    return LoopProgram(parts, halves, tuple(node.name for node in saved), kept is not None)


def compile_around_loop(loop: PrologueEpilogue, compiler: str) -> PrologueEpilogue:
    """With what is around the loop as it is compiled."""
    for segment in (*loop.before, *loop.after):
        if segment.gm is not None:
            around_loop(compiler)(segment.gm)
    return loop
