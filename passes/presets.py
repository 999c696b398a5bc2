"""Pass pipelines: the only place that defines the order of passes.

    before_planning            a traced joint (or forward) graph -> a graph ready for planning
    deciding                   -> with a decision, on rank 0 alone or without any rank
    after_planning             -> the graph that this rank runs
    building_storage_program   -> under a budget: with its operations and storages in plain numbers
    solving_checkpointing      -> with the activations to save, on rank 0 alone; or `obeying_checkpointing`, from a saved plan
    rematerializing            -> with recomputation in backward, or offloading, ready to be partitioned

Then the graph is partitioned into forward and backward, by torch's partitioner unless a checkpointing decision exists, and each
half is compiled (`hpml_compiler.compile.lower.lowering`). The graph before the first pass is AOTAutograd's trace with
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
from passes.checkpointing.checkpoint_keys import PARTITIONER_CHOICE, STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.obey_checkpointing import ObeyCheckpointing
from passes.checkpointing.other_microbatches import CountOtherMicrobatches
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
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.sharding.search.mesh_search import SearchConfig
from passes.sharding.search.placement_passes import AdoptPlacements, DecidePlacements, ObeyPlacements
from passes.simulation.memory.storage_program import Microbatches
from passes.transforms.cleanup.channels_last import ChannelsLast
from passes.transforms.cleanup.common_subexpressions import Deduplicate
from passes.transforms.cleanup.draw_at_positions import DrawAtPositions
from passes.transforms.cleanup.normalization import Normalize
from passes.transforms.cleanup.pre_partition import InductorJoint, TagPhases
from passes.transforms.cleanup.unalias_cat import UnaliasCat
from passes.transforms.cleanup.unalias_gradients import UnaliasGradients
from passes.transforms.comm.gradient_buckets import BucketGradients
from passes.transforms.comm.low_rank_gradients import LowRankGradients
from passes.transforms.comm.narrow_gradients import NarrowGradients
from passes.transforms.comm.prefetch_all_gather import PrefetchAllGather
from passes.transforms.comm.repeat_gathers import RepeatGathers
from passes.transforms.loss_chunks.chunk_loss import ChunkLoss, Chunks
from passes.transforms.memory.activation_offload import OffloadActivations
from passes.transforms.memory.hoist_to_forward import HoistToForward
from passes.transforms.memory.rematerialization import Rematerialize
from passes.transforms.microbatch.loop_invariant_motion import MoveLoopInvariants
from passes.transforms.microbatch.single_microbatch import MarkSingleMicrobatch
from passes.transforms.shard.hoist_batch_slice import HoistBatchSlice
from passes.transforms.shard.redistributor import MeshGroups
from passes.transforms.shard.spmd_rewrite import Shard


def before_planning(inputs: Sequence[GraphInput], forward_outputs: int | None, microbatches: int = 1,
                    leaves: bool = True, compiler: str = "eager") -> PassManager:
    """Passes from a graph, traced for a compiler, to a graph ready for planning."""
    draws = (DrawAtPositions(),) if compiler == "inductor" else ()
    return PassManager((Normalize(), *draws, Shapes(), Flops(), AnalyzeSignature(tuple(inputs), forward_outputs),
                        FindOperations(microbatches, leaves)))


def annotate(gm: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int | None, microbatches: int = 1,
             leaves: bool = True, compiler: str = "eager") -> AnalyzedGraph:
    """Run the passes before planning; `forward_outputs` is None for a forward graph."""
    start = time.perf_counter()
    before_planning(inputs, forward_outputs, microbatches, leaves, compiler)(gm)
    return AnalyzedGraph(gm, inputs, {"annotate": time.perf_counter() - start})


def deciding(conditions: SearchConfig, mesh: Mapping[str, int] | None, pins: Mapping[str, Pin] | None = None) -> PassManager:
    """Passes from a graph ready for planning to its decision: by a search or, with the `pins` of a plan, from the plan.

    Decisions on microbatches, stages and checkpointing are made by further pass managers below, each before its readers.
    """
    pinned = None if mesh is None else FrozenMap(mesh)
    placements = DecidePlacements(conditions, pinned) if pins is None else ObeyPlacements(conditions, pinned, FrozenMap(pins))
    manager = PassManager((placements,))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def building_storage_program(builder: BuildStorageProgram) -> PassManager:
    """Build the storage program of a joint graph that is ready to be partitioned."""
    return PassManager((*((ChannelsLast(), UnaliasCat()) if builder.fuses else ()), HoistToForward(), Shapes(), Flops(),
                        builder))


def counting_microbatches(microbatches: Microbatches) -> PassManager:
    """Count other microbatches in a storage program."""
    manager = PassManager((CountOtherMicrobatches(microbatches),))
    manager.check(available=(STORAGE_PROGRAM,))
    return manager


def solving_checkpointing(forward_outputs: int, keep: SolveCheckpointing, chosen: bool = False) -> PassManager:
    """Choose the activations to save under a memory budget. chosen: the partitioner's choice for this graph is known."""
    manager = PassManager((keep,) if chosen else (FindPartitionerChoice(forward_outputs), keep))
    manager.check(available=(STORAGE_PROGRAM, *((PARTITIONER_CHOICE,) if chosen else ())))
    return manager


def obeying_checkpointing(kept: ObeyCheckpointing) -> PassManager:
    """Take the activations to save from a saved plan."""
    manager = PassManager((kept,))
    manager.check(available=(STORAGE_PROGRAM,))
    return manager


def rematerializing(kept: CheckpointDecision, folder: str = "") -> PassManager:
    """From a graph with a storage program and the checkpointing decision that all ranks agreed on to one whose backward
    recomputes the other activations, or copies them back from where forward offloaded them. folder: see
    `OffloadActivations`."""
    manager = PassManager((AdoptCheckpointing(kept), Rematerialize(),
                           *((OffloadActivations(folder),) if kept.offloaded else ())))
    manager.check(available=(STORAGE_PROGRAM,))
    return manager


def one_device(compiler: str) -> PassManager:
    """Prepare the joint graph of a model on one device for partitioning."""
    return PassManager((InductorJoint(), Deduplicate()) if compiler == "inductor" else (Deduplicate(),))


def one_stage(compiler: str, forward_outputs: int, repeats: LoopGathers = ONCE, ahead: bool = True, chunks: Chunks = 1,
              ) -> PassManager:
    """The same for one microbatch of a pipeline stage. repeats, ahead, chunks: as in `in_loop`."""
    collectives = (*_in_chunks(forward_outputs, chunks, of_stage=True), *_repeated(repeats, ahead))
    return PassManager((*collectives, InductorJoint(), Deduplicate()) if compiler == "inductor" else (
        Deduplicate(), *collectives, TagPhases(forward_outputs, holds_back=bool(repeats.gathered))))


def whole_batch(forward_outputs: int, kept_gradients: Sequence[int], decision: Decision | None = None,
                groups: MeshGroups | None = None, asks: bool = False) -> PassManager:
    """From a graph ready for planning to one whose step runs the whole batch at once, for
    `passes.transforms.microbatch.loop_split`. decision, groups: if a stage has several ranks; no decision if it has one.
    asks: see `Shard`."""
    shards: tuple[Pass, ...] = () if decision is None or groups is None else (
        AdoptPlacements(decision), Shard(groups, asks), LowRankGradients(), Deduplicate())
    manager = PassManager((*shards, MarkSingleMicrobatch(), UnaliasGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def to_microbatches(decision: Decision, groups: MeshGroups, forward_outputs: int, kept_gradients: Sequence[int],
                    asks: bool = False, gathered: Iterable[str] = ()) -> PassManager:
    """From a graph ready for planning, and a decision with time as its last axis, to one that can be split at its markers
    (`passes.transforms.microbatch.loop_split`). asks: see `Shard`. gathered: parameters that each microbatch gathers."""
    repeat = (RepeatGathers(frozenset(gathered)),) if gathered else ()
    manager = PassManager((AdoptPlacements(decision), Shard(groups, asks), LowRankGradients(), *repeat, MoveLoopInvariants(),
                           Deduplicate(), UnaliasGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def around_loop(compiler: str, compact: bool = False) -> PassManager:
    """Prepare the prologue or epilogue of the microbatch loop for compilation. compact: as in `after_planning`."""
    return PassManager((Deduplicate(), BucketGradients(soon=compact), NarrowGradients(),
                        *((InductorJoint(),) if compiler == "inductor" else ())))


def in_loop(compiler: str, forward_outputs: int, repeats: LoopGathers = ONCE, ahead: bool = True, chunks: Chunks = 1,
            ) -> PassManager:
    """Prepare the joint graph of one microbatch for partitioning into forward and backward. repeats: collectives of parameters
    that each microbatch runs. ahead, chunks: as in `after_planning`."""
    return PassManager((*_in_chunks(forward_outputs, chunks), *_repeated(repeats, ahead),
                        InductorJoint() if compiler == "inductor" else TagPhases(
        forward_outputs, holds_back=bool(repeats.gathered))))


def _in_chunks(forward_outputs: int, chunks: Chunks, of_stage: bool = False) -> tuple[Pass, ...]:
    """Passes that compute the loss in chunks, and merge what forward and backward had each for itself."""
    return () if chunks == 1 else (ChunkLoss(forward_outputs, chunks, of_stage), Deduplicate())


def _repeated(repeats: LoopGathers, ahead: bool) -> tuple[Pass, ...]:
    """Passes over collectives of parameters that each microbatch runs."""
    return (*((BucketGradients(soon=True), NarrowGradients()) if repeats.reduced else ()),
            *((PrefetchAllGather(ahead=ahead),) if repeats.gathered else ()))


def after_planning(decision: Decision, groups: MeshGroups, compiler: str, forward_outputs: int | None = None,
                   kept_gradients: Sequence[int] = (), compact: bool = False, ahead: bool = True,
                   by_block: bool = False, outside: Iterable[str] = (), chunks: Chunks = 1) -> PassManager:
    """From a graph ready for planning, and the decision that all ranks agreed on, to the graph that this rank runs.

    forward_outputs: None for a forward graph, which is not partitioned. kept_gradients: indices among the graph's outputs of
    the gradients that go into `.grad`. compact: copy these gradients so that they take no more memory than they need, and no
    longer, at the cost of less overlap of reductions. ahead: prefetch gathers one block before they are read. by_block: no
    bucket has reductions of two blocks. outside: inputs that the caller of the graph passes already sliced, per
    `batch_slices_of`. chunks: of the loss.
    """
    if isinstance(chunks, str) and any(axis.rows for axis in decision.axes):
        chunks = 1  # ranks with unequal rows would choose different numbers, and wait for each other in vain
    passes: list[Pass] = [
        AdoptPlacements(decision), Shard(groups, at_run_time=compiler == "inductor"), LowRankGradients(),
        Deduplicate(),
        *(() if forward_outputs is None else _in_chunks(forward_outputs, chunks)), HoistBatchSlice(tuple(outside)),
        BucketGradients(soon=compact, by_block=by_block), PrefetchAllGather(ahead=ahead), NarrowGradients(),
        UnaliasGradients(tuple(kept_gradients), forward_outputs or 0, compact)]
    if compiler == "inductor":
        passes.append(InductorJoint())
    elif forward_outputs is not None:
        passes.append(TagPhases(forward_outputs))
    manager = PassManager(tuple(passes))
    manager.check(available=(GRAPH_SIGNATURE, OPERATIONS))
    return manager


def analyzing_stage_body(kinds: Mapping[str, InputKind], forward_outputs: int) -> PassManager:
    """Analyze the body of a microbatch loop for `finding_stages`."""
    return PassManager((Shapes(), Flops(), AnalyzeStageBody(FrozenMap(kinds), forward_outputs)))


def adopting_stages(stages: StageAssignment) -> PassManager:
    """The same with known stages."""
    return PassManager((AdoptStages(stages),))


def finding_stages(count: int, device: Device, starts: tuple[str, ...] = (), ranks: tuple[int, ...] = (),
                   speeds: tuple[float, ...] = ()) -> PassManager:
    """Assign the calls of a graph ready for planning to stages
    (`passes.transforms.pipeline.stage_graphs`). starts, ranks, speeds: as `FindStages` takes them."""
    manager = PassManager((FindBlocks(), FindStages(count, device, starts, ranks, speeds)))
    manager.check(available=(SHAPES, FLOPS, GRAPH_SIGNATURE))
    return manager
