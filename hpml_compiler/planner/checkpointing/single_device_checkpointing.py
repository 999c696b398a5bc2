"""Activation checkpointing of a graph on one device under a memory budget, where nothing is placed."""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, problem_of_loop
from hpml_compiler.planner.checkpointing.checkpointing_choice import with_checkpointing
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace, layers_of
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.memory_budget import NO_LIMIT, StepContext
from hpml_compiler.planner.graph.microbatch_estimate import in_time
from hpml_compiler.planner.graph.optimality_gap import with_gap
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from passes import compat
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import MicrobatchPlacement
from passes.graph.loops.loop_parts import LoopSplit
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import enumerate_meshes
from passes.presets import building_storage_program
from passes.presets import one_device as prepare
from passes.sharding.oracle.memory_model import MemoryModel


def checkpoint_single_device(joint: GraphModule, forward_outputs: int, sharing: StepContext, cluster: Cluster,
                             pinned: CheckpointingPlan | None = None,
                             folded: FewLayerTrace | None = None) -> CheckpointDecision:
    """Solve checkpointing of a traced graph. joint: the graph; afterwards it has its storage program and can be partitioned.
    pinned: checkpointing of a saved plan to apply. folded: the deeper model of which a few layers were traced. Raises
    Infeasible, with the smallest budget that was found to work."""
    builder = single_device_builder(joint, forward_outputs, sharing.options, cluster, folded)
    prepare(sharing.options.compiler)(joint)
    building_storage_program(builder)(joint)
    problem = CheckpointProblem(joint, forward_outputs, sharing.share_of(sharing.replicated), sharing.replicated.name)
    return obeyed_or_solved(problem, sharing.options, pinned)


def keep_in_loop(marked: GraphModule, loop: LoopSplit, microbatches: int, forward_outputs: int, sharing: StepContext,
                 cluster: Cluster,
                 pinned: CheckpointingPlan | None = None, folded: FewLayerTrace | None = None,
                 strict: bool = True) -> CheckpointDecision:
    """Solve checkpointing of a microbatched step, whose loop was cut out of `marked`; afterwards, the loop body has its storage
    program. strict: raise Infeasible where nothing fits; otherwise return the choice with the lowest peak."""
    builder = single_device_builder(marked, forward_outputs, sharing.options, cluster, folded)
    problem = problem_of_loop(marked, loop, microbatches, builder, sharing.share_of(sharing.replicated),
                              sharing.replicated.name, folded)
    return obeyed_or_solved(problem, sharing.options, pinned, strict)


def obeyed_or_solved(problem: CheckpointProblem, options: Options, pinned: CheckpointingPlan | None,
                     strict: bool = True) -> CheckpointDecision:
    if pinned is not None and (kept := problem.obeyed(pinned)) is not None:
        return kept
    return problem.solved(options, strict)


def single_device_builder(gm: GraphModule, forward_outputs: int, options: Options, cluster: Cluster,
                       folded: FewLayerTrace | None = None) -> BuildStorageProgram:
    """The pass that builds the storage program of a graph. gm: the traced graph."""
    (mesh,) = enumerate_meshes(cluster)
    lists, layers = layers_of(folded)
    return BuildStorageProgram(forward_outputs, MeshPrices(mesh, options.optimizer_states), options.compiler == "inductor",
                               frozenset(compat.mutated_inputs(gm)), offload_us=offload_price(options, cluster), lists=lists,
                               layers=layers, recompute=tuple(options.recompute.items()))


def given_checkpointing(options: Options, graph_hash: Callable[[], str]) -> CheckpointingPlan | None:
    """Checkpointing of a graph in a loaded plan for one device; None without one. Raises PlanMismatch if the graph differs."""
    given = options.load_plan()
    if given is None or given.world_size != 1 or not any(graph.kept for graph in given.graphs):
        return None
    return given.check(graph_hash(), torch.__version__, 1).kept


def plan_single_device(annotated: AnalyzedGraph, kept: CheckpointDecision, options: Options, cluster: Cluster, name: str,
                       folded: FewLayerTrace | None = None, times: MicrobatchPlacement | None = None) -> PlanResult:
    """The plan of a graph whose checkpointing is decided. options: with the budget in bytes. times: placements on the
    microbatch axis, where it has microbatches."""
    # The saved values fit. The placement problem would count all that might be saved, so it gets no limit.
    free = options.model_copy(update={"memory_budget": None, "plan": None})
    plan = functools.partial(plan_graph, annotated, free, cluster, name=name, lifetimes=MemoryModel(0.0), budget_bytes=NO_LIMIT)
    planned = plan() if folded is None else plan(shorter=folded.shorter, further=folded.further)
    record = planned.record if folded is None else folded.of_all_layers(planned.record)
    relaxed, record = planned, in_time(record, annotated, times, cluster, options)
    return with_gap(replace(planned, checkpointing=kept, record=with_checkpointing(record, kept, options)), relaxed,
                    options.gap)
