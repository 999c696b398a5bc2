"""What one device keeps of a graph under a byte budget: where everything lies is no question there."""
from __future__ import annotations

import functools
from dataclasses import replace

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import (
    apply_checkpointing_plan,
    choose_checkpointing,
    with_checkpointing,
)
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace, layers_of
from hpml_compiler.planner.graph.graph_planning import PlanResult, plan_graph
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.graph.optimality_gap import with_gap
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from passes import compat
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import enumerate_meshes
from passes.presets import building_storage_program
from passes.presets import one_device as prepare
from passes.sharding.oracle.memory_model import MemoryModel

NO_LIMIT = 10.0**15
"""Bytes that no device has."""


def checkpoint_single_device(joint: GraphModule, forward_outputs: int, sharing: StepContext, cluster: Cluster,
                             pinned: CheckpointingPlan | None = None,
                             folded: FewLayerTrace | None = None) -> CheckpointDecision:
    """joint: as it was traced; afterwards it is ready to be cut, and has its tape. pinned: what a plan that is obeyed keeps.
    folded: of which deeper model it has a few layers. Raises Infeasible, with the smallest budget that was found to work."""
    options, written = sharing.options, frozenset(compat.mutated_inputs(joint))
    prepare(options.compiler)(joint)
    (mesh,) = enumerate_meshes(cluster)
    prices = MeshPrices(mesh, options.optimizer_states)
    lists, layers = layers_of(folded)
    building_storage_program(BuildStorageProgram(forward_outputs, prices, options.compiler == "inductor", written,
                                                 offload_us=offload_price(options, cluster), lists=lists, layers=layers))(joint)
    room, name = sharing.room(sharing.whole), sharing.whole.name
    if pinned is not None and (kept := apply_checkpointing_plan(joint, room, pinned, name)) is not None:
        return kept
    return choose_checkpointing(joint, forward_outputs, room, options, name, strict=True)


def plan_single_device(annotated: AnalyzedGraph, kept: CheckpointDecision, options: Options, cluster: Cluster, name: str,
                       folded: FewLayerTrace | None = None) -> PlanResult:
    """The plan of a graph of which that was decided. options: with the budget in bytes."""
    # What is kept fits; what the placement problem would count, all that might be, need not.
    free = options.model_copy(update={"memory_budget": None, "plan": None})
    plan = functools.partial(plan_graph, annotated, free, cluster, name=name, lifetimes=MemoryModel(0.0), budget_bytes=NO_LIMIT)
    planned = plan() if folded is None else plan(shorter=folded.shorter, further=folded.further)
    record = planned.record if folded is None else folded.of_all_layers(planned.record)
    return with_gap(replace(planned, kept=kept, record=with_checkpointing(record, kept, options)), planned, options.gap)
