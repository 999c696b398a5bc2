"""Rewrite an analyzed graph as planned, and update the metadata of its runtime wrapper."""
from __future__ import annotations

from dataclasses import replace

from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.compile.wrapper.sharded_outputs import sharded_outputs_of, sharded_tangents_of
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import PlanResult
from hpml_compiler.session import session
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.presets import after_planning
from passes.transforms.shard.hoist_batch_slice import batch_slices_of


def rewrite_for_rank(annotated: AnalyzedGraph, planned: PlanResult, inputs: GraphInputs, options: Options,
                     forward_outputs: int | None, takes: RuntimeMetadata) -> RuntimeMetadata:
    """Turn the graph into one rank's program, with collectives where placements change. forward_outputs: None for an inference
    graph. Returns `takes` with the sharded results and gradients, and the slices of arguments that each call takes."""
    gm, budgeted = annotated.gm, options.memory_budget is not None
    left = sharded_outputs_of(annotated, planned.decision)
    after_planning(
        planned.decision, session.current().groups(planned.mesh), options.compiler, forward_outputs,
        inputs.kept_gradients(annotated, forward_outputs), compact=budgeted or options.zero in (1, 2, 3),
        ahead=planned.kept is None or planned.kept.ahead, outside=() if budgeted else inputs.only_read(annotated))(gm)
    taken = {annotated.interface.positions[name]: each for name, each in batch_slices_of(gm).items()}
    return replace(takes, left=left, taken=taken, tangents=sharded_tangents_of(annotated, planned.decision))
