"""Build the program of a step: split a stage, or the body of a loop without a pipeline, into forward and backward."""
from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.lower.lowering import values_of
from hpml_compiler.compile.program.lowered_stages import StageProgram
from hpml_compiler.compile.program.rerun import rerun_state_of, saved_for_rerun
from hpml_compiler.compile.program.step_program import StepInterface, StepProgram
from hpml_compiler.planner.checkpointing.checkpointed_halves import cut_as_kept
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.planner.pipeline.stage_halves import StageSplit, halves_of
from hpml_compiler.runtime.program.microbatch_loop import saved_for_backward
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.graph.loops.loop_parts import LoopSplit, PrologueEpilogue
from passes.transforms.pipeline.stage_graphs import StageGraph
from passes.transforms.pipeline.stage_io import GRADIENT, StageHalves, StageIO, half_of


def stage_program(graph: StageGraph, compiler: str, splits_backward: bool, time_us: float,
                  split: StageSplit | None) -> StageProgram:
    """splits_backward: whether gradients of weights are a separate graph, as zero-bubble schedules need it. split: under a
    memory budget."""
    halves = halves_of(graph, compiler, splits_backward, split)
    return StageProgram(graph.ends(), halves, _sent(graph) | _waiting(graph, halves), time_us)


def step_interface(marked: GraphModule, loop: PrologueEpilogue, microbatches: int, forward_outputs: int,
                   written: Container[int], others: bool, in_loop: list[Any]) -> StepInterface:
    """marked: the graph that the loop was cut out of. written: positions of inputs that the model mutates. others: whether
    gradients may arrive at other outputs than the loss. in_loop: fakes of the values that the loop's forward saves for its
    backward, if all of forward runs first."""
    values = {node.name: node.meta.get("val") for node in marked.graph.nodes}
    results = tuple(None if node is None else node.meta["val"] for node in returned_nodes(marked))
    loss = loss_of(marked)
    again = rerun_state_of(marked, loss, forward_outputs, written, others)
    if loss is None:
        saved = [*(values[name] for name in saved_for_backward(loop, forward_outputs)), *in_loop]
    else:
        gradients = (x for x in results[forward_outputs:] if x is not None)
        saved = [*gradients, values[loss], *saved_for_rerun(marked, again)]
    return StepInterface(microbatches, forward_outputs, {name: values[name] for name in loop.inputs}, results, loop, loss,
                         again, tuple(saved))


def one_stage_program(marked: GraphModule, loop: LoopSplit, microbatches: int, forward_outputs: int, written: Container[int],
                      others: bool, step_us: float, kept: CheckpointDecision | None = None, folder: str = "") -> StepProgram:
    """The program of a loop without a pipeline; see `step_interface`. step_us: predicted time of the step. kept:
    checkpointing decision of the loop body under a budget. folder: for offloaded values."""
    body, outputs = loop.body, len(loop.forward)
    taken = tuple(node.name for node in body.graph.find_nodes(op="placeholder"))
    if kept is None:
        # The partition that saves least, with either compiler: microbatches are there to reduce saved values.
        forward, backward = compat.min_cut_partition(body, values_of(body), outputs, None)
    else:
        forward, backward = cut_as_kept(body, kept, outputs, folder)
    saved = {node.name: node.meta["val"] for node in returned_nodes(forward)[outputs:] if node is not None}
    parts = step_interface(marked, loop.around(), microbatches, forward_outputs, written, others,
                           [*saved.values()] * microbatches)
    ends = StageIO(0, taken, (), (), (), (), tuple(range(outputs)), tuple(range(len(loop.backward))), (), (), (), (), {})
    halves = StageHalves(half_of(forward), half_of(backward), None, saved)
    stage = StageProgram(ends, halves, frozenset(), step_us / microbatches)  # a half is called for each microbatch
    return StepProgram(parts, (stage,), counted=kept is not None)


def _sent(graph: StageGraph) -> frozenset[int]:
    """Places of gradients whose memory the previous stage may still read, or that another stage accumulates into."""
    returned = returned_nodes(graph.gm)[graph.forward_outputs:]
    gradients, sent = returned[:len(graph.gradients)], returned[len(graph.gradients):]
    handed_on = {GRADIENT + name for name in graph.sent_back}
    received = [node for node in graph.gm.graph.find_nodes(op="placeholder") if node.name in handed_on]
    elsewhere = {memory_of(node) for node in (*sent, *received)}
    return frozenset(place for place, node in zip(graph.gradients, gradients)
                     if place is not None and memory_of(node) in elsewhere)


def _waiting(graph: StageGraph, halves: StageHalves) -> frozenset[int]:
    """Places of gradients that share memory with inputs of the weight part of backward, which runs later."""
    backward, weight = halves.backward, halves.weight
    if backward is None or weight is None:
        return frozenset()
    held = {memory_of(node) for node in weight.gm.graph.find_nodes(op="placeholder")}
    return frozenset(place for place, node in zip(graph.gradients, returned_nodes(backward.gm))
                     if place is not None and node is not None and memory_of(node) in held)
