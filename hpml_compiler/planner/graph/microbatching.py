"""Decide whether a graph can be microbatched, into how many microbatches, and which operations the loop contains."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.fx import GraphModule

from passes.analyses.cross_sample_ops import mixing_operations
from passes.graph.decision import Decision, MicrobatchPlacement
from passes.graph.graph_copy import copy_graph
from passes.graph.loops.loop_parts import LoopSplit, PrologueEpilogue
from passes.graph.placement_graph import PlacementGraph
from passes.presets import around_loop, in_loop, to_microbatches, whole_batch
from passes.sharding.loop_gathers import ONCE, LoopGathers, reduced_in_loop
from passes.sharding.microbatch_axis import replicated_decision, solve_time_axis, with_time_axis
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel
from passes.solver.solvers import SolverOptions
from passes.solver.work_limit import WorkLimit
from passes.transforms.cleanup.drop_tangents import DropTangents
from passes.transforms.loss_chunks.chunk_loss import Chunks
from passes.transforms.microbatch.loop_split import split_at_markers
from passes.transforms.shard.redistributor import MeshGroups

log = logging.getLogger("hpml")
LEAST_SHARE = 0.5
"""Minimum share of the work on rows in the loop: with less, microbatches save little and cost much."""


def microbatch_placement(graph: PlacementGraph, microbatches: int, solver: SolverOptions, allowance: WorkLimit | None = None,
                         ) -> MicrobatchPlacement | None:
    """Placement of each value on the microbatch axis; None, with a warning, where rows of the batch depend on each other.
    allowance: replaces the solver's time limit."""
    if not any(value.microbatch for value in graph.values):
        log.warning("the step is not split into %d microbatches: no input of this graph has batch rows", microbatches)
        return None
    if mixed := mixing_operations(graph):
        log.warning("the step is not split into microbatches: rows of the batch depend on each other at %s", few_of(mixed))
        return None
    times = solve_time_axis(graph, microbatches, solver, allowance)
    if times.share < LEAST_SHARE:
        log.warning("the step is not split into microbatches: %.0f %% of the work on batch rows would be outside their loop, "
                    "most of it at %s",
                    100 * (1 - times.share), few_of(times.whole))
        return None
    log.info("%d microbatches, with %.1f %% of the work on batch rows in their loop", microbatches, 100 * times.share)
    return times


def mark_loop(gm: GraphModule, graph: PlacementGraph, placements: Decision | None, times: MicrobatchPlacement | None,
              groups: MeshGroups, forward_outputs: int, kept_gradients: Sequence[int], at_run_time: bool = False,
              repeats: LoopGathers = ONCE) -> None:
    """Rewrite an annotated graph to one with the markers of its loop. placements: on devices, with these groups; None where
    every value is whole. times: None for a loop of one microbatch. at_run_time: see `Shard`. repeats: collectives of parameters
    that each microbatch runs."""
    if times is None:
        whole_batch(forward_outputs, kept_gradients, placements, groups, at_run_time)(gm)
        return
    if placements is None:
        placements, groups = replicated_decision(graph), MeshGroups((), (), ())
    times, reduced = reduced_in_loop(graph, times, repeats)
    to_microbatches(with_time_axis(placements, graph, times, reduced), groups.with_time(times.microbatches), forward_outputs,
                    kept_gradients, at_run_time, repeats.gathered)(gm)


def loop_of(gm: GraphModule, graph: PlacementGraph, placements: Decision | None, times: MicrobatchPlacement, groups: MeshGroups,
            forward_outputs: int, kept_gradients: Sequence[int], compiler: str, repeats: LoopGathers = ONCE,
            ahead: bool = True, compact: bool = False, chunks: Chunks = 1) -> LoopSplit:
    """Cut the microbatch loop out of an annotated graph, which gets its markers; all parts are ready to be compiled, or to be
    partitioned into forward and backward. See `mark_loop`, `in_loop` and `around_loop`."""
    mark_loop(gm, graph, placements, times, groups, forward_outputs, kept_gradients, compiler == "inductor", repeats)
    loop = split_at_markers(gm, forward_outputs)
    in_loop(compiler, len(loop.forward), repeats, ahead, chunks)(loop.body)
    prepare_around_loop(loop, compiler, compact or repeats != ONCE)
    return loop


def prepare_around_loop(loop: PrologueEpilogue, compiler: str, compact: bool = False) -> None:
    """Prepare the graphs before and after the loop for compilation, in place. compact: see `around_loop`."""
    for segment in (*loop.before, *loop.after):
        if segment.gm is not None:
            around_loop(compiler, compact)(segment.gm)


def memory_model_in_time(times: MicrobatchPlacement | None, loss_inside: bool) -> MemoryModel:
    """When bytes are counted with microbatches: if the loss is inside, only one microbatch's saved values are in memory."""
    return MemoryModel(in_flight=1.0 / times.microbatches) if times is not None and loss_inside else STEP_PEAK


def few_of(names: Sequence[str]) -> str:
    """The first of the names, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def loss_of(joint: GraphModule) -> str | None:
    """Name of the loss's tangent: that of the only scalar output; None if there is not exactly one."""
    scalars = [node.name for node in joint.graph.find_nodes(op="placeholder")
               if node.name.startswith("tangents") and node.meta["val"].dim() == 0]
    return scalars[0] if len(scalars) == 1 else None


def other_tangents(joint: GraphModule) -> frozenset[str]:
    """Names of the tangents besides the loss's, which are assumed to be zero, where the loss is computed inside."""
    loss = loss_of(joint)
    return frozenset(node.name for node in joint.graph.find_nodes(op="placeholder")
                     if loss is not None and node.name.startswith("tangents") and node.name != loss)


def joint_of_loss(joint: GraphModule) -> GraphModule:
    """A copy of a joint graph without the tangents besides the loss's, if it has a loss."""
    gm = copy_graph(joint)
    DropTangents(other_tangents(gm))(gm)
    return gm
