"""Plan of a pipelined graph, made on demand.

A rank has the parameters that its stages read. Times of a stage are those of the calls of its blocks, at the plan's costs;
sends and memory are read off the graphs that run.
"""
from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import checkpointing_plan
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.memory_budget import NO_LIMIT, GraphMemory
from hpml_compiler.planner.graph.microbatch_estimate import with_microbatches
from hpml_compiler.planner.graph.microbatching import joint_of_loss, loss_of
from hpml_compiler.planner.pipeline.pipeline_estimate import StagePart, with_pipeline
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, cluster_of_stage, memory_model_of
from hpml_compiler.planner.pipeline.stage_checkpointing import StageCheckpointing
from hpml_compiler.planner.pipeline.stage_halves import StagedBody
from hpml_compiler.plans.pipeline_records import SentPlan
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from passes.analyses.flops import FLOPS
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.energy_model import capped_cluster
from passes.graph.decision import MicrobatchPlacement
from passes.graph.graph_signature import GraphInput
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.pipeline.block_places import places
from passes.pipeline.find_blocks import BLOCK_CHAIN, FindBlocks, learned_nodes
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.stage_assignment import SentValue, StageAssignment
from passes.presets import annotate
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.transforms.pipeline.stage_graphs import StageGraph
from passes.transforms.pipeline.stage_io import StageHalves


class PipelinePlanBuilder:
    """joint: the traced graph. times: placements on the microbatch axis, None with one microbatch. cluster: of all ranks.
    planned: the plan of the ranks that share a stage; None where a stage has one rank. checkpointing, kept, halves: of all
    stages. repeats: collectives of parameters that each microbatch runs."""

    def __init__(self, joint: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int, options: Options,
                 cluster: Cluster, times: MicrobatchPlacement | None, planned: PlanResult | None,
                 checkpointing: StageCheckpointing, kept: Sequence[CheckpointDecision], halves: Sequence[StageHalves],
                 repeats: LoopGathers = ONCE):
        self.joint, self.inputs, self.forward_outputs = joint, inputs, forward_outputs
        self.options, self.cluster, self.times, self.planned = options, cluster, times, planned
        self.checkpointing, self.kept, self.halves, self.repeats = checkpointing, kept, halves, repeats

    def plan(self, name: str, marked: GraphModule, staged: StagedBody, table: PipelineSchedule) -> GraphPlan:
        """marked, staged: the graph before and after it is cut into stages. table: the schedule."""
        count = 1 if self.times is None else self.times.microbatches
        joint = joint_of_loss(self.joint)
        annotated = annotate(joint, self.inputs, self.forward_outputs, count, self.options.shards_outputs,
                             self.options.compiler)
        mesh = {PP_AXIS: len(table.actions)}
        alone, cap = cluster_of_stage(self.cluster, mesh[PP_AXIS]), self.options.power_cap
        if self.planned is None:  # one rank has no choice
            own = self.options.model_copy(update={"mesh": None, "plan": None})
            planned = plan_graph(annotated, own, alone, name=name, lifetimes=memory_model_of(table), budget_bytes=NO_LIMIT)
        else:
            planned, mesh = self.planned, dict(self.options.mesh or {})
        record = planned.record.model_copy(update={"name": name})
        if self.times is not None:
            record = with_microbatches(record, annotated.graph, self.times, loss_of(joint) is not None,
                                       mesh_from_pin(planned.mesh, capped_cluster(alone, cap)),
                                       self.options.optimizer_states, self.repeats, annotated.interface.names)
        read = _parameters(marked, staged, annotated.interface.names)
        listed = _listed(annotated.gm, staged.stages, record.operations)
        parts = [self._part(k, listed[k], staged, table, read[k]) for k in range(table.stages)]
        return with_pipeline(record, parts, table, mesh, capped_cluster(self.cluster, cap), self.options.optimizer_states,
                             self.memory(table))

    def memory(self, table: PipelineSchedule) -> list[GraphMemory]:
        """Memory of each rank besides what its stages save."""
        return [self.checkpointing.memory(rank) for rank in range(len(table.actions))]

    def _part(self, k: int, listed: Collection[str], staged: StagedBody, table: PipelineSchedule, read: Mapping[str, bool],
              ) -> StagePart:
        stages = staged.stages
        on = stages.over(k, FORWARD) if k + 1 < table.stages and table.ranks[k + 1] != table.ranks[k] else ()
        back = stages.over(k - 1, BACKWARD) if k and table.ranks[k - 1] != table.ranks[k] else ()
        share = share_of_weights(staged.graphs[k], self.halves[k]) if table.splits_backward else None
        in_flight, kept = self.checkpointing.in_flight(k), self.kept[k]
        return StagePart(stages.blocks[k], dict.fromkeys(listed, 1), read, kept.saved_bytes // in_flight, sent((*on, *back)),
                         in_flight, checkpointing_plan(kept, self.checkpointing.options), share)


def sent(values: Iterable[SentValue]) -> tuple[SentPlan, ...]:
    return tuple(SentPlan(value=each.value, bytes=round(each.bytes), backward=each.phase == BACKWARD) for each in values)


def _listed(gm: GraphModule, stages: StageAssignment, names: Container[str]) -> list[list[str]]:
    """Names of the full graph's calls that each stage runs, found by block: a sharded rank has other names for its calls. A
    block without calls in the loop is in the stage of the previous one."""
    stage_of = {block: k for k, blocks in enumerate(stages.blocks) for block in blocks}
    FindBlocks()(gm)
    chain = read(BLOCK_CHAIN, gm)
    latest, of_block = 0, []
    for block in chain.blocks:
        latest = stage_of.get(block.name, latest)
        of_block.append(latest)
    found: list[list[str]] = [[] for _ in stages.blocks]
    for node, place in places(gm, chain, learned_nodes(gm)).items():
        if node.name in names:
            found[of_block[place]].append(node.name)
    return found


def share_of_weights(graph: StageGraph, halves: StageHalves) -> float:
    """Share of the weight part in backward's work, by FLOPs."""
    if halves.backward is None or halves.weight is None:
        return float(halves.backward is None)
    flops = {node.name: read(FLOPS, node) for node in graph.gm.graph.nodes if FLOPS.selects(node)}
    first, second = (sum(flops.get(node.name, 0.0) for node in half.gm.graph.nodes)
                     for half in (halves.backward, halves.weight))
    return second / (first + second) if first + second else 0.5


def _parameters(marked: GraphModule, staged: StagedBody, names: Mapping[str, str]) -> list[dict[str, bool]]:
    """Parameters that each stage reads, also through values made of them before the loop; True for the stage that sums their
    gradients."""
    made_of: dict[str, set[str]] = {}
    for node in marked.graph.nodes:
        made_of[node.name] = {names[node.name]} if node.name in names else {
            name for x in node.all_input_nodes for name in made_of[x.name]}
    found: list[dict[str, bool]] = [{} for _ in staged.graphs]
    seen: set[str] = set()
    for given, readers in staged.stages.parameters.items():
        for name in sorted(made_of.get(staged.reads[given].name, ())):
            for k, stage in enumerate(readers):
                found[stage][name] = found[stage].get(name, False) or (k == 0 and name not in seen)
            seen.add(name)
    return found
