"""The order of passes: the only place where it is written.

    before_planning   a traced joint graph (or a forward graph) -> one that can be planned
    deciding          -> with a decision, on rank 0 alone or without any rank
    after_planning    -> what this rank runs
    taping            -> where there is a budget: with what it runs and holds, in plain numbers
    keeping           -> with what is kept for backward, on rank 0 alone; or `obeying_checkpointing`, as a saved plan says
    rematerializing   -> with what is computed once more in backward, or offloaded, ready to be cut

Then the graph is cut into forward and backward, by torch's partitioner where nothing says what is kept, and each half is
compiled (`hpml_compiler.compile.lower.lowering`). The graph before the first pass is what AOTAutograd traces, taken apart by
the compiler's decompositions (`passes.tracing`).
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import GraphModule

from passes.analyses.find_operations import FindOperations
from passes.analyses.flops import FLOPS, Flops
from passes.analyses.partitioner_choice import FindPartitionerChoice
from passes.analyses.shapes import SHAPES, Shapes
from passes.analyses.signature_analysis import AnalyzeSignature
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.base import Pass
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.obey_checkpointing import ObeyCheckpointing
from passes.checkpointing.solve_checkpointing import AdoptCheckpointing, SolveCheckpointing
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import Decision
from passes.graph.graph_signature import GraphInput
from passes.graph.placement_graph import InputKind
from passes.graph.planning_keys import GRAPH_SIGNATURE, OPERATIONS
from passes.hardware.device import Device
from passes.json_records import FrozenMap
from passes.manager import PassManager
from passes.pipeline.find_blocks import FindBlocks
from passes.pipeline.find_stages import FindStages
from passes.pipeline.stage_assignment import StageAssignment
from passes.pipeline.stage_body import AdoptStages, AnalyzeStageBody
from passes.sharding.formulation.problem_entities import Pin
from passes.sharding.search.mesh_search import SearchConfig
from passes.sharding.search.placement_passes import AdoptPlacements, DecidePlacements, ObeyPlacements
from passes.transforms.cleanup.channels_last import ChannelsLast
from passes.transforms.cleanup.common_subexpressions import Deduplicate
from passes.transforms.cleanup.normalization import Normalize
from passes.transforms.cleanup.pre_partition import InductorJoint, TagPhases
from passes.transforms.cleanup.unalias_cat import UnaliasCat
from passes.transforms.cleanup.unalias_gradients import UnaliasGradients
from passes.transforms.comm.gradient_buckets import BucketGradients
from passes.transforms.comm.prefetch_all_gather import PrefetchAllGather
from passes.transforms.memory.activation_offload import OffloadActivations
from passes.transforms.memory.hoist_to_forward import HoistToForward
from passes.transforms.memory.rematerialization import Rematerialize
from passes.transforms.microbatch.loop_invariant_motion import MoveLoopInvariants
from passes.transforms.microbatch.single_microbatch import MarkSingleMicrobatch
from passes.transforms.shard.hoist_batch_slice import HoistBatchSlice
from passes.transforms.shard.redistributor import MeshGroups
from passes.transforms.shard.spmd_rewrite import Shard


def before_planning(inputs: Sequence[GraphInput], forward_outputs: int | None, microbatches: int = 1,
                    leaves: bool = True) -> PassManager:
    """From a traced graph to one that can be planned."""
    return PassManager((Normalize(), Shapes(), Flops(), AnalyzeSignature(tuple(inputs), forward_outputs),
                        FindOperations(microbatches, leaves)))


def annotate(gm: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int | None, microbatches: int = 1,
             leaves: bool = True) -> AnalyzedGraph:
    """Run the passes before planning; `forward_outputs` is None for a forward graph."""
    start = time.perf_counter()
    before_planning(inputs, forward_outputs, microbatches, leaves)(gm)
    return AnalyzedGraph(gm, inputs, {"annotate": time.perf_counter() - start})


def deciding(conditions: SearchConfig, mesh: Mapping[str, int] | None, pins: Mapping[str, Pin] | None = None) -> PassManager:
    """From a graph that can be planned to its decision: by a search or, with the `pins` of a plan, as that says.

    What else will be decided (microbatches, stages, what is kept for backward) stands here, each before what reads it.
    """
    pinned = None if mesh is None else FrozenMap(mesh)
    placements = DecidePlacements(conditions, pinned) if pins is None else ObeyPlacements(conditions, pinned, FrozenMap(pins))
    manager = PassManager((placements,))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def building_storage_program(tape: BuildStorageProgram) -> PassManager:
    """From a joint graph that is ready to be cut to what keeping and rematerializing know of it."""
    return PassManager((*((ChannelsLast(), UnaliasCat()) if tape.fuses else ()), HoistToForward(), Shapes(), Flops(), tape))


def solving_checkpointing(forward_outputs: int, keep: SolveCheckpointing) -> PassManager:
    """From there to what is kept of forward under a budget."""
    manager = PassManager((FindPartitionerChoice(forward_outputs), keep))
    manager.check(available=(STORAGE_PROGRAM,))
    return manager


def obeying_checkpointing(kept: ObeyCheckpointing) -> PassManager:
    """The same, as a saved plan says."""
    manager = PassManager((kept,))
    manager.check(available=(STORAGE_PROGRAM,))
    return manager


def rematerializing(kept: CheckpointDecision, folder: str = "") -> PassManager:
    """From a graph with a tape, and what all ranks agreed to keep, to one whose backward computes the rest once more, or
    fetches it from where forward put it. folder: see `OffloadActivations`."""
    manager = PassManager((AdoptCheckpointing(kept), Rematerialize(),
                           *((OffloadActivations(folder),) if kept.offloaded else ())))
    manager.check(available=(STORAGE_PROGRAM,))
    return manager


def one_device(compiler: str) -> PassManager:
    """From the joint graph that one device runs whole to one that is ready to be cut."""
    return PassManager((InductorJoint(), Deduplicate()) if compiler == "inductor" else (Deduplicate(),))


def one_stage(compiler: str, forward_outputs: int) -> PassManager:
    """The same for a stage of a pipeline that one device runs whole."""
    return PassManager((InductorJoint(), Deduplicate()) if compiler == "inductor" else (
        Deduplicate(), TagPhases(forward_outputs)))


def whole_batch(forward_outputs: int, kept_gradients: Sequence[int], decision: Decision | None = None,
                groups: MeshGroups | None = None, asks: bool = False) -> PassManager:
    """From a graph that can be planned to one whose step goes through its batch at once, for
    `passes.transforms.microbatch.loop_split`. decision, groups: where a stage has several ranks; no decision where it has one.
    asks: see `Shard`."""
    shards: tuple[Pass, ...] = () if decision is None or groups is None else (
        AdoptPlacements(decision), Shard(groups, asks), Deduplicate())
    manager = PassManager((*shards, MarkSingleMicrobatch(), UnaliasGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def to_microbatches(decision: Decision, groups: MeshGroups, forward_outputs: int, kept_gradients: Sequence[int],
                    asks: bool = False) -> PassManager:
    """From a graph that can be planned, and a decision with time as its last axis, to one that can be cut at its markers
    (`passes.transforms.microbatch.loop_split`). asks: see `Shard`."""
    manager = PassManager((AdoptPlacements(decision), Shard(groups, asks), MoveLoopInvariants(), Deduplicate(),
                           UnaliasGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def around_loop(compiler: str) -> PassManager:
    """From what is done before the loop over microbatches, or after it, to what is compiled."""
    return PassManager((Deduplicate(), BucketGradients(), *((InductorJoint(),) if compiler == "inductor" else ())))


def in_loop(compiler: str, forward_outputs: int) -> PassManager:
    """From the joint graph of one microbatch to one that is ready to be cut into forward and backward."""
    return PassManager((InductorJoint() if compiler == "inductor" else TagPhases(forward_outputs),))


def after_planning(decision: Decision, groups: MeshGroups, compiler: str, forward_outputs: int | None = None,
                   kept_gradients: Sequence[int] = (), compact: bool = False, ahead: bool = True,
                   by_block: bool = False, outside: Iterable[str] = ()) -> PassManager:
    """From a graph that can be planned, and the decision that all ranks agreed on, to what this rank runs.

    forward_outputs: None for a forward graph, which is not cut. kept_gradients: places among the graph's outputs of the
    gradients that go into `.grad`. compact: these take no more memory than they need, for a copy, and no
    longer, for less of a reduction that goes on beside something else. ahead: what is gathered is started a block before it is
    read. by_block: no bucket has reductions of two blocks. outside: inputs of which whoever calls
    the graph gives what `batch_slices_of` says.
    """
    passes: list[Pass] = [
        AdoptPlacements(decision), Shard(groups, asks=compiler == "inductor"), Deduplicate(), HoistBatchSlice(tuple(outside)),
        BucketGradients(soon=compact, by_block=by_block), PrefetchAllGather(ahead=ahead),
        UnaliasGradients(tuple(kept_gradients), forward_outputs or 0, compact)]
    if compiler == "inductor":
        passes.append(InductorJoint())
    elif forward_outputs is not None:
        passes.append(TagPhases(forward_outputs))
    manager = PassManager(tuple(passes))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def analyzing_stage_body(kinds: Mapping[str, InputKind], forward_outputs: int) -> PassManager:
    """From the body of a loop over microbatches to what `finding_stages` takes."""
    return PassManager((Shapes(), Flops(), AnalyzeStageBody(FrozenMap(kinds), forward_outputs)))


def adopting_stages(stages: StageAssignment) -> PassManager:
    """From there to the same with stages that are known."""
    return PassManager((AdoptStages(stages),))


def finding_stages(count: int, device: Device, starts: tuple[str, ...] = ()) -> PassManager:
    """From a graph that can be planned to one that says into which stages it can be split
    (`passes.transforms.pipeline.stage_graphs`). starts: as `FindStages` takes them."""
    manager = PassManager((FindBlocks(), FindStages(count, device, starts)))
    manager.check(available=(SHAPES, FLOPS, GRAPH_SIGNATURE))
    return manager
