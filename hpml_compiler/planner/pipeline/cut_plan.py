"""Plan of a pipelined step, made without ranks to run it.

The graph is prepared as a run does it until its stages are known, for a rank of the first stage.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import checkpointing_plan
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.graph.gather_choice import GatherChoice
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.memory_budget import NO_LIMIT, GraphMemory
from hpml_compiler.planner.graph.microbatch_estimate import with_microbatches
from hpml_compiler.planner.graph.microbatching import loss_of, mark_loop
from hpml_compiler.planner.graph.stage_gathers import CutResult, StageGathers
from hpml_compiler.planner.graph.step_problem import StepProblem
from hpml_compiler.planner.pipeline.extrapolated_stages import ExtrapolatedStages, lists_in_order
from hpml_compiler.planner.pipeline.layer_costs import LayerCosts, LayerPieces
from hpml_compiler.planner.pipeline.layer_memory import LayerMemory, piece_table
from hpml_compiler.planner.pipeline.pipeline_estimate import peaks_of_ranks, resident_memory, with_pipeline
from hpml_compiler.planner.pipeline.pipeline_graph_plan import PipelinePlanBuilder
from hpml_compiler.planner.pipeline.pp_axis import (
    PP_AXIS,
    cluster_of_stage,
    is_split,
    memory_model_of,
    options_of_stage,
    over_all_axes,
    schedule_of,
)
from hpml_compiler.planner.pipeline.stage_checkpointing import StageCheckpointing, StagedStep, fullest_of, given_stages
from hpml_compiler.planner.pipeline.stage_halves import StagedBody, halves_of, stage_body
from hpml_compiler.planner.search.fitting_search import FittingSearch, memory_limit
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.plan_prices import PlannedPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.cost_model.energy_model import capped_cluster
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import BadInput
from passes.graph.decision import MicrobatchPlacement
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.graph.loops.loop_parts import LoopSplit
from passes.hardware.axis import device_axes, fullest_rank
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.stage_assignment import StageAssignment
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.sharding.oracle.memory_model import MemoryModel
from passes.transforms.microbatch.loop_split import split_at_markers
from passes.transforms.shard.redistributor import MeshGroups


class MakesPlan(ABC):
    """Makes the plan of a pipelined step from the plan of the ranks that share a stage, None where a stage has one rank. times:
    placements on the microbatch axis; None with one microbatch. given: the collectives of parameters that each microbatch
    repeats, where that is decided already. stages, fullest: those of the latest plan, and under a memory budget the memory of
    its fullest rank. Raises TooFewBlocks."""

    def __init__(self, step: StepProblem, times: MicrobatchPlacement | None, given: LoopGathers | None = None):
        self.step, self.times, self.given = step, times, given
        self.stages: StageAssignment | None = None
        self.fullest: GraphMemory | None = None

    def __call__(self, planned: PlanResult | None) -> GraphPlan:
        choice = self.choice(planned)
        found = self.cut(planned, ONCE) if choice is None else StageGathers(
            choice, partial(self.cut, planned), memory_limit(self.step.options, self.step.cluster)).found()
        self.stages, self.fullest = found.stages, found.fullest
        return found.record

    def choice(self, planned: PlanResult | None) -> GatherChoice | None:
        return gather_choice_of(self.step, self.times, planned, self.given)

    @abstractmethod
    def cut(self, planned: PlanResult | None, repeats: LoopGathers) -> CutResult:
        """Cut the graph into stages whose microbatches repeat these collectives, and count it."""


def gather_choice_of(step: StepProblem, times: MicrobatchPlacement | None, planned: PlanResult | None,
                     given: LoopGathers | None) -> GatherChoice | None:
    """The collectives that the microbatches of a stage may repeat; None where they have none."""
    if times is None or planned is None:
        return None
    record = planned.record if step.folded is None else step.folded.of_all_layers(planned.record)
    own, alone = options_of_stage(step.options), cluster_of_stage(step.cluster, step.options.stage_ranks)
    return GatherChoice(record, step.annotated, times, alone, own, given, step.hurried)


def cut_plan_of(step: StepProblem, times: MicrobatchPlacement | None, given: LoopGathers | None = None) -> MakesPlan:
    return CutPlan(step, times, given=given) if step.folded is None else FoldedCutPlan(step, times, step.folded, given)


class CutPlan(MakesPlan):
    """Makes the plan of a traced graph. starts: first block of each stage but stage 0, if known. kept: under a memory budget,
    the decisions of all stages; if empty, they are made, whether they fit or not."""

    def __init__(self, step: StepProblem, times: MicrobatchPlacement | None, starts: tuple[str, ...] = (),
                 kept: tuple[CheckpointDecision, ...] = (), given: LoopGathers | None = None):
        super().__init__(step, times, given)
        self.starts, self.kept = starts, kept

    def cut(self, planned: PlanResult | None, repeats: LoopGathers) -> CutResult:
        step, traced = self.step, self.step.traced
        assert traced is not None, "a graph is cut as it was traced"
        table = schedule_of(step.options, 1 if self.times is None else self.times.microbatches)
        gm = copy_graph(step.annotated.gm)
        loop, staged, groups = _staged(gm, step, planned, self.times, table.stages, self.starts, repeats,
                                       tuple(table.ranks))
        kept, compiler, fullest = self.kept, step.options.compiler, None
        cut = StagedStep(gm, step.annotated.interface, loop, staged, table, step.outputs)
        checkpointing = StageCheckpointing.of(step, cut, planned, groups)
        if step.sharing is not None:
            kept = kept or checkpointing.of_all(given_stages(step))
            fullest = checkpointing.fullest(kept)
            splits = [checkpointing.split(k, each) for k, each in enumerate(kept)]
            halves = [halves_of(each, compiler, table.splits_backward, own) for each, own in zip(staged.graphs, splits)]
        else:
            halves = [halves_of(each, compiler, table.splits_backward) for each in staged.graphs]
            kept = checkpointing.as_partitioned(halves)
        made = PipelinePlanBuilder(traced.gm, traced.inputs, step.outputs, step.options, step.cluster, self.times, planned,
                                   checkpointing, kept, halves, repeats)
        record = made.plan(step.name, gm, staged, table)
        owned: list[dict[str, int]] = [{} for _ in table.actions]
        for name, rank in checkpointing.owners.items():
            owned[rank][name] = 1
        return CutResult(record, staged.stages, _peaks(record, made.memory(table)), owned, fullest=fullest)


class FoldedCutPlan(MakesPlan):
    """Makes the plan of a deep model of which a few layers were traced. Stage boundaries follow from the layers in the plan.
    All ranks repeat the same collectives. Raises DepthsDiffer where these layers do not represent all, or do not fit."""

    def __init__(self, step: StepProblem, times: MicrobatchPlacement | None, folded: FewLayerTrace,
                 given: LoopGathers | None = None):
        super().__init__(step, times, given)
        self.folded = folded

    def cut(self, planned: PlanResult | None, repeats: LoopGathers) -> CutResult:
        step, times, folded, options = self.step, self.times, self.folded, self.step.options
        mesh, states = options.mesh or {}, options.optimizer_states
        alone = cluster_of_stage(step.cluster, mesh[PP_AXIS])
        table = schedule_of(options, 1 if times is None else times.microbatches)
        found = planned or plan_graph(step.annotated, options_of_stage(options), alone, name=step.name, budget_bytes=NO_LIMIT,
                                      lifetimes=memory_model_of(table), allowance=step.allowance, shorter=folded.shorter,
                                      further=folded.further)
        record, prices = folded.of_all_layers(found.record), MeshPrices(
            mesh_from_pin(found.mesh, capped_cluster(alone, options.power_cap)), states)
        if times is not None:
            graph = step.annotated
            record = with_microbatches(record, graph.graph, times, loss_of(graph.gm) is not None, prices.mesh, states,
                                       repeats, graph.interface.names)
        calls = step_graph(record, PlannedPrices(record, RepricedPlan(record, prices)))
        stages = ExtrapolatedStages(record, calls, lists_in_order(record, folded), table, options.stage_speeds)
        costs, checkpointing = self._pieces(stages, planned, repeats)
        layers = LayerMemory(checkpointing, costs, table, [costs.pieces.within(stages.places(k)) for k in range(table.stages)])
        memory = [resident_memory(record, stages.reads_of(rank)) for rank in range(len(table.actions))]
        fullest, kept = [], dict[int, CheckpointingPlan]()
        for own, decided in zip(memory, layers.of_all_ranks(memory), strict=True):
            fullest.append(replace(own, saved=sum(each.saved_bytes for each in decided.values())))
            kept.update((k, checkpointing_plan(each, checkpointing.options)) for k, each in decided.items())
        record = with_pipeline(record, stages.parts(costs, layers, kept), table,
                               mesh if is_split(mesh) else {PP_AXIS: options.stage_ranks},
                               capped_cluster(step.cluster, options.power_cap), states, memory)
        most = fullest_of(fullest) if checkpointing.budgeted else None
        owned = [self._copies(stages.reads_of(rank)) for rank in range(len(table.actions))]
        return CutResult(record, costs.staged.stages, _peaks(record, memory), owned, self._copies(folded.parameters), most)

    def _copies(self, parameters: Iterable[str]) -> dict[str, int]:
        """Numbers of these parameters of the model that each parameter of the graph stands for: those of equal layers."""
        counts = Counter(map(self.folded.of_traced_layer, parameters))
        return {name: counts[self.folded.of_traced_layer(path)] for name, path in self.step.annotated.interface.names.items()}

    def __call__(self, planned: PlanResult | None) -> GraphPlan:
        record = super().__call__(planned)
        if self.fullest is not None and record.memory.peak > memory_limit(self.step.options, self.step.cluster):
            raise DepthsDiffer("each layer saves its input here, and less memory may do where a stage does not")
        return record

    def _pieces(self, stages: ExtrapolatedStages, planned: PlanResult | None, repeats: LoopGathers,
                ) -> tuple[LayerCosts, StageCheckpointing]:
        """The traced layers, cut into pieces."""
        step, gm, table = self.step, copy_graph(self.step.annotated.gm), stages.table
        pieces = LayerPieces.cut(stages.sections(), stages.lists)
        try:
            loop, staged, groups = _staged(gm, step, planned, self.times, len(pieces.starts) + 1, pieces.starts,
                                           repeats)
        except BadInput as error:
            raise DepthsDiffer(f"its layers are not a chain: {error.what}") from error
        cut = StagedStep(gm, step.annotated.interface, loop, staged, piece_table(table, range(staged.stages.count)),
                         step.outputs)
        costs = LayerCosts(staged, pieces, stages.lists, step.options.compiler, table.splits_backward)
        return costs, StageCheckpointing.of(step, cut, planned, groups)


def _peaks(record: GraphPlan, memory: Sequence[GraphMemory]) -> list[int]:
    """Bytes of each rank. memory: see `with_pipeline`."""
    assert record.pipeline is not None, "it was put there"
    return [peak.bytes for peak in peaks_of_ranks(record, record.pipeline, memory)]


def _staged(gm: GraphModule, step: StepProblem, planned: PlanResult | None, times: MicrobatchPlacement | None, stages: int,
            starts: tuple[str, ...], repeats: LoopGathers, ranks: tuple[int, ...] = (),
            ) -> tuple[LoopSplit, StagedBody, MeshGroups]:
    """The loop and the stages of a graph, which gets its loop markers as on the rank of a stage with most rows, with its
    groups."""
    annotated, axes = step.annotated, device_axes(planned.mesh if planned is not None else {})
    groups = MeshGroups(axes, fullest_rank(axes if planned is None else planned.decision.axes),
                        tuple(f"planned_{axis.name}" for axis in axes))
    mark_loop(gm, annotated.graph, planned and planned.decision, times, groups, step.outputs,
              range(step.outputs, len(returned_nodes(gm))), step.options.compiler == "inductor", repeats)
    loop = split_at_markers(gm, step.outputs)
    chunks = 1 if step.options.chunks == "auto" else step.options.chunks
    staged = stage_body(gm, annotated.interface.kinds, loop, stages, step.cluster.device, lambda find: find(), starts,
                        repeats, chunks, ranks, step.options.stage_speeds if ranks else ())
    return loop, staged, groups


def stage_search(options: Options, cluster: Cluster, table: PipelineSchedule,
                 finish: Callable[[PlanResult], GraphPlan]) -> FittingSearch:
    """The search for placements that fit, which counts the bytes of all stages."""
    # Under a memory budget, saved values are decided for each answer, so that the search leaves them out.
    lifetimes = memory_model_of(table) if not options.chooses_saved else MemoryModel(0.0)
    return FittingSearch(options, cluster, finish, lifetimes, options.stage_ranks)


def unpipelined_search(options: Options, cluster: Cluster) -> FittingSearch:
    """The search for a graph that is not pipelined: the ranks of every stage run it in full."""
    mesh = options.mesh or {}
    return FittingSearch(options, cluster, lambda planned: over_all_axes(
        planned.record, mesh if is_split(mesh) else {PP_AXIS: options.stage_ranks}))
