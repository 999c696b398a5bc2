"""Chunks in which a run will compute the loss of a planned step, for the plan's record."""
from __future__ import annotations

from collections.abc import Sequence

from hpml_compiler.planner.graph.microbatching import loop_of
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.step_decision import DecidedStep
from passes.graph.decision import LossChunking
from passes.graph.graph_copy import copy_graph
from passes.hardware.axis import device_axes
from passes.presets import after_planning
from passes.sharding.loop_gathers import ONCE
from passes.transforms.loss_chunks.chunk_loss import chunk_loss
from passes.transforms.loss_chunks.chunk_notes import noting_chunks
from passes.transforms.loss_chunks.loss_region import Unchunkable, find_region
from passes.transforms.shard.redistributor import MeshGroups


def loss_chunking(step: StepProblem, decided: DecidedStep, notes: Sequence[LossChunking]) -> LossChunking | None:
    """The chunks of the loss; None if that is unknown. notes: made while the step was decided. Where its graph was not
    rewritten, a copy is, as on the first rank."""
    step = decided.step or step  # its graph is another where microbatches were refused
    options, decision, planned = step.options, decided.decision, decided.planned
    if notes:
        return notes[-1]
    if step.traced is not None and step.traced.loss_chunks is not None:
        return step.traced.loss_chunks
    few = step.folded is not None and options.chunks == "auto"  # the share of a step that they hold is not that of all layers
    if few or decision.stages is not None or options.chunks == 1 or step.forward_outputs is None:
        return None
    try:
        find_region(step.annotated.gm, step.outputs)
    except Unchunkable as error:
        return LossChunking(reason=str(error))
    gm = copy_graph(step.annotated.gm)
    with noting_chunks() as made:
        axes = device_axes(planned.mesh if planned is not None else {})
        groups = MeshGroups(axes, (0,) * len(axes), tuple(f"planned_{axis.name}" for axis in axes))
        if decision.microbatches is not None:
            loop_of(gm, step.annotated.graph, planned and planned.decision, decision.microbatches, groups, step.outputs,
                    step.kept_gradients, options.compiler, decision.gathers or ONCE, compact=options.is_compact,
                    chunks=options.chunks)
        elif planned is None or all(axis.size == 1 for axis in axes):
            chunk_loss(gm, step.outputs, options.chunks)
        else:
            after_planning(planned.decision, groups, options.compiler, step.outputs, step.kept_gradients,
                           compact=options.is_compact, chunks=options.chunks)(gm)
    return made[-1] if made else None
