"""Activation checkpointing of pipeline stages: the values that each stage saves for backward, and its memory.

Each stage is a checkpointing problem of its own: its joint graph runs one microbatch, and the schedule says how many others of
this stage, and of other stages on its rank, are in memory meanwhile (`passes.pipeline.microbatches_in_flight`). Under a memory
budget, a rank with several stages decides them one after another, each beside those decided so far. Without one, torch's
partitioner has chosen what each stage saves, and only its memory is counted.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpoint_problem import CheckpointProblem, segment_program_of
from hpml_compiler.planner.checkpointing.offload_cost import offload_price
from hpml_compiler.planner.checkpointing.rank_sweeps import RankSweeps
from hpml_compiler.planner.graph.memory_budget import NO_LIMIT, GraphMemory, StepContext
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.pipeline.pp_axis import cluster_of_stage
from hpml_compiler.planner.pipeline.stage_halves import StagedBody, StageSplit, base_names, counted_stage
from hpml_compiler.planner.pipeline.stage_memory import RankMemory, StageBytes, bytes_of, in_flight, sends_on
from hpml_compiler.planner.pipeline.stage_parameters import StageDependencies
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.peak_memory import VERSIONS
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from passes import compat
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.loop_memory import LoopMemory, loop_memory
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_signature import GraphSignature, input_position
from passes.graph.loops.loop_parts import LoopSplit
from passes.hardware.mesh import enumerate_meshes, mesh_from_pin
from passes.pipeline.microbatches_in_flight import moments_of
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.presets import counting_microbatches
from passes.solver.work_limit import WorkLimit
from passes.transforms.pipeline.backward_split import weight_part_bytes
from passes.transforms.pipeline.stage_io import StageHalves
from passes.transforms.shard.redistributor import MeshGroups


@dataclass(frozen=True)
class StagedStep:
    """A step that is cut into stages. marked: the graph that the loop was cut out of; interface: its signature;
    forward_outputs: number of its outputs that are forward's."""

    marked: GraphModule
    interface: GraphSignature
    loop: LoopSplit
    staged: StagedBody
    table: PipelineSchedule
    forward_outputs: int

    @cached_property
    def needs(self) -> StageDependencies:
        return StageDependencies(self.marked, self.loop, self.staged, self.table, self.interface)

    @property
    def at_once(self) -> bool:
        """True if backward of a microbatch runs within the graph's forward, since the loss is inside."""
        return loss_of(self.marked) is not None

    def waits(self, stage: int) -> bool:
        """True if a stage's saved values are all in memory until the weight part of its backward: it has no other part."""
        return self.table.splits_backward and not self.staged.graphs[stage].own_sent_back

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, its in enumerate(self.table.ranks) if its == rank]


def memory_of_parameters(annotated: AnalyzedGraph, planned: PlanResult | None, options: Options, on_cpu: bool,
                         ) -> dict[str, tuple[float, ...]]:
    """Bytes of each parameter on a rank that has it, of its gradient, of its optimizer state and of their copies, by
    placeholder. planned: the plan of the ranks that share a stage, where there are several. on_cpu: whether copies for
    `redundancy` are in the device's memory."""
    values, states = [value for value in annotated.graph.values if value.kind == "parameter"], options.resident_states
    if planned is None:
        again = VERSIONS * (1 + options.redundancy) if options.redundancy and on_cpu else 0
        return {v.name: (float(v.bytes), v.trainable * float(v.bytes), v.trainable * states * float(v.bytes),
                         again * (1.0 + v.trainable * options.optimizer_states) * v.bytes) for v in values}
    record = planned.record
    stored = {v.name: float(record.parameters[annotated.interface.names[v.name]].bytes_per_device) for v in values}
    everything = sum(stored.values()) or 1.0
    trained = sum(stored[v.name] for v in values if v.trainable) or 1.0
    memory = record.memory
    return {v.name: (memory.parameters * stored[v.name] / everything,
                     v.trainable * memory.gradients * stored[v.name] / trained,
                     v.trainable * memory.optimizer * stored[v.name] / trained,
                     memory.copies * stored[v.name] / everything) for v in values}


def fullest_of(memory: Sequence[GraphMemory]) -> GraphMemory:
    """Memory of the rank that holds most."""
    return max(memory, key=lambda each: each.state + max(each.gradients, each.saved))


def given_stages(step: StepProblem) -> GraphPlan | None:
    """The plan of this graph that the options give, before the graph is changed; none for a step that is compiled again. Raises
    PlanMismatch."""
    given = None if step.traced is None else step.options.load_plan()
    return given and given.check(step.graph_hash, torch.__version__, step.cluster.world_size)


def stage_bytes(step: StagedStep, stage: int, joint: GraphModule) -> StageBytes:
    """joint: of the stage, with its storage program."""
    graph, waits, collected = step.staged.graphs[stage], step.waits(stage), step.loop.backward
    received_back = bytes_of(graph, graph.received_back)
    late = received_back if waits else weight_part_bytes(read(STORAGE_PROGRAM, joint), joint, len(graph.own_sent_back))
    gradients = sum(torch.Size(collected[place].shape).numel() * collected[place].dtype.itemsize
                    for place in graph.gradients if place is not None)
    sent = bytes_of(graph, graph.own_sent) if sends_on(step.table, stage) else 0
    sent_back = bytes_of(graph, graph.own_sent_back) if sends_on(step.table, stage - 1) else 0
    return StageBytes(bytes_of(graph, graph.received), received_back, sent, sent_back, late, gradients, waits)


class StageCheckpointing:
    """Decides what the stages of a step save, and counts their memory. builder: the pass that builds the storage program of the
    full graph on the ranks of one stage. parameters: see `memory_of_parameters`. allowance: charged with the decisions."""

    def __init__(self, step: StagedStep, sharing: StepContext, builder: BuildStorageProgram,
                 parameters: Mapping[str, tuple[float, ...]], allowance: WorkLimit | None = None):
        self.step, self.sharing, self.builder, self.parameters = step, sharing, builder, parameters
        self.allowance = allowance
        self.owners = step.needs.owners(parameters)
        self._stages_of: dict[int, _RankStages] = {}

    @staticmethod
    def of(problem: StepProblem, step: StagedStep, planned: PlanResult | None, groups: MeshGroups) -> StageCheckpointing:
        """step: the problem's graph in stages. planned, groups: the plan of the ranks that share a stage, where there are
        several, and their process groups."""
        options, cluster = problem.options, problem.cluster
        sharing, written, device = problem.sharing, problem.written, problem.device
        if sharing is None:
            assert problem.traced is not None, "without a budget, a plan is made of the traced graph"
            sharing = StepContext.unlimited(problem.name, options, cluster.device.kind)
            written, device = frozenset(compat.mutated_inputs(problem.traced.gm)), cluster.device.kind
        alone = cluster_of_stage(cluster, options.stage_ranks)
        mesh = enumerate_meshes(alone)[0] if planned is None else mesh_from_pin(planned.mesh, alone)
        builder = BuildStorageProgram(problem.outputs, MeshPrices(mesh, options.optimizer_states),
                                      options.compiler == "inductor",
                                   written, groups.axis_of, offload_price(options, cluster), device,
                                   recompute=tuple(options.recompute.items()), gathers_again=options.zero == 3)
        parameters = memory_of_parameters(problem.annotated, planned, options, cluster.device.kind == "cpu")
        return StageCheckpointing(step, sharing, builder, parameters, problem.allowance)

    @property
    def options(self) -> Options:
        return self.sharing.options

    @property
    def budgeted(self) -> bool:
        return self.sharing.budget != NO_LIMIT

    def memory(self, rank: int) -> GraphMemory:
        """Memory of a rank besides what its stages save."""
        own = [each for name, each in self.parameters.items() if self.owners.get(name, rank) == rank]
        held, gradients, states, copies = (sum(each[k] for each in own) for k in range(4))
        largest = max((each[1] for each in own), default=0.0)
        return GraphMemory(self.sharing.replicated.name, held, gradients, states, largest, copies=copies)

    def fullest(self, kept: Sequence[CheckpointDecision]) -> GraphMemory:
        """Memory of the rank that holds most, with what its stages save; other graphs of the step count it on all ranks. kept:
        decisions for all stages."""
        memory = [replace(self.memory(rank), saved=sum(kept[k].saved_bytes for k in self.step.stages_of(rank)))
                  for rank in range(len(self.step.table.actions))]
        return fullest_of(memory)

    def in_flight(self, stage: int) -> int:
        """Most microbatches of a stage that have saved values at a time."""
        table = self.step.table
        return in_flight(stage, moments_of(table, table.ranks[stage], self.step.at_once), self.step.waits(stage))

    def stages_of(self, rank: int) -> _RankStages:
        if rank not in self._stages_of:
            self._stages_of[rank] = _RankStages(self, rank)
        return self._stages_of[rank]

    def split(self, stage: int, kept: CheckpointDecision) -> StageSplit:
        """Split of a stage into forward and backward, as decided."""
        return StageSplit(kept, self.builder_of(stage), self.options.offload_folder or "")

    def decided(self, rank: int, strict: bool, allowance: WorkLimit | None = None) -> tuple[CheckpointDecision, ...]:
        """The decisions for the stages of a rank, in order. strict: raise Infeasible if nothing fits; otherwise return the
        choices with the lowest peak."""
        own = self.stages_of(rank)
        if len(own.joints) == 1:
            return (own.problem(own.stages[0], {}).solved(self.options, strict, allowance),)
        sweeps = RankSweeps(own.name, own.stages, own.problem, own.in_flight, self.options, allowance)
        return sweeps.strictly_decided() if strict else sweeps.decided()

    def obeyed_or_decided(self, rank: int, strict: bool, given: GraphPlan | None = None,
                          allowance: WorkLimit | None = None) -> tuple[CheckpointDecision, ...]:
        """given: a saved plan to apply, where it fits."""
        stages = () if given is None or given.pipeline is None else given.pipeline.stages
        pinned = [stages[k].kept for k in self.step.stages_of(rank) if k < len(stages)]
        decided = [each for each in pinned if each is not None and each.budget_bytes is not None]
        if decided and len(decided) == len(pinned):
            found = self.obeyed(rank, decided)
            if found is not None:
                return found
        return self.decided(rank, strict, allowance)

    def of_all(self, given: GraphPlan | None = None) -> tuple[CheckpointDecision, ...]:
        """The decisions for all stages, whether they fit or not."""
        table = self.step.table
        found = {k: kept for rank in range(len(table.actions))
                 for k, kept in zip(self.step.stages_of(rank), self.obeyed_or_decided(rank, False, given), strict=True)}
        return tuple(found[k] for k in range(table.stages))

    def obeyed(self, rank: int, pinned: Sequence[CheckpointingPlan]) -> tuple[CheckpointDecision, ...] | None:
        """Apply the choices of a saved plan for the stages of a rank. None if they were made for another budget and exceed this
        one. Raises BadInput if they do not match."""
        own = self.stages_of(rank)
        saved = {k: each.saved_bytes // self.in_flight(k) for k, each in zip(own.stages, pinned, strict=True)}
        found = [own.problem(k, saved).obeyed(each) for k, each in zip(own.stages, pinned, strict=True)]
        return None if None in found else tuple(each for each in found if each is not None)

    def as_partitioned(self, halves: Sequence[StageHalves]) -> tuple[CheckpointDecision, ...]:
        """Decisions for all stages that save what torch's partitioner saves. halves: of all stages."""
        table, found = self.step.table, dict[int, CheckpointDecision]()
        for rank in range(len(table.actions)):
            own = self.stages_of(rank)
            names = {k: base_names(own.joints[k], halves[k].saved) for k in own.stages}
            saved = {k: own.problem(k, {}).counted(names[k]).saved_bytes // self.in_flight(k)
                     for k in own.stages if len(own.stages) > 1}
            found.update((k, own.problem(k, saved).counted(names[k])) for k in own.stages)
        return tuple(found[k] for k in range(table.stages))

    def around(self, rank: int, layers: Callable[[Node], int] = lambda _: 1) -> LoopMemory:
        """Memory around the loop on a rank: of its own computations, and of the gradients that it has. layers: number of nodes
        of the model that a traced node stands for."""
        step, needs, owners = self.step, self.step.needs, self.owners
        loop, alone = needs.around(rank, owners), needs.gradients_alone(owners)
        elsewhere = needs.gradients_elsewhere(rank, owners)
        made = {place for k in step.stages_of(rank) for place in step.staged.graphs[k].gradients}
        here = tuple(each for place, each in enumerate(loop.backward) if place in made or place not in alone)
        outputs = needs.outputs_alone() if self.options.shards_outputs else {}
        others = {loop.results[k] for k, owner in outputs.items() if owner != rank}
        results = tuple(None if name in elsewhere or name in others else name for name in loop.results)
        loop = replace(loop, forward=tuple(each for each in loop.forward if each.name not in others), backward=here,
                       results=results)
        return loop_memory(step.marked, loop, step.forward_outputs, step.table.microbatches, step.at_once,
                           segment_program_of(self.builder), layers)

    def builder_of(self, stage: int) -> BuildStorageProgram:
        """The pass that builds the storage program of a stage."""
        graph, step = self.step.staged.graphs[stage], self.step
        written = {node.name for k, node in enumerate(step.marked.graph.find_nodes(op="placeholder"))
                   if input_position(node, k) in self.builder.written}
        changed = frozenset(name for name, read in step.staged.reads.items() if read.name in written)
        return replace(self.builder, forward_outputs=graph.forward_outputs, written=changed, received=frozenset(graph.read))


class _RankStages:
    """The checkpointing problems of the stages of one rank."""

    def __init__(self, found: StageCheckpointing, rank: int):
        step, self.name, self.options = found.step, found.sharing.replicated.name, found.options
        self.stages = step.stages_of(rank)
        self.graphs = {k: step.staged.graphs[k] for k in self.stages}
        self.share = found.sharing.share_of(found.memory(rank))
        self.joints = {k: counted_stage(self.graphs[k], found.options.compiler, step.table.splits_backward, found.builder_of(k))
                       for k in self.stages}
        self.around = found.around(rank)
        self.memory = RankMemory(moments_of(step.table, rank, step.at_once), {
            k: stage_bytes(step, k, joint) for k, joint in self.joints.items()})
        self.in_flight = {k: found.in_flight(k) for k in self.stages}

    def problem(self, stage: int, saved: Mapping[int, int]) -> CheckpointProblem:
        """saved: bytes that one microbatch saves in the other stages of this rank."""
        others = self.memory.others(stage, saved)
        counting_microbatches(others)(self.joints[stage])
        return CheckpointProblem(self.joints[stage], self.graphs[stage].forward_outputs, self.share,
                                 f"{self.name}, stage {stage}", replace(self.around, others=others))
