"""The order of passes: the only place where it is written.

    before_planning   a traced joint graph (or a forward graph) -> one that can be planned
    deciding          -> with a decision, on rank 0 alone or without any rank
    after_planning    -> what this rank runs
    taping            -> where there is a budget: with what it runs and holds, in plain numbers
    keeping           -> with what is kept for backward, on rank 0 alone; or `obeying`, as a saved plan says
    rematerializing   -> with what is computed once more in backward, or offloaded, ready to be cut

Then the graph is cut into forward and backward, by torch's partitioner where nothing says what is kept, and each half is
compiled (`hpml_compiler.compile.lowering`). The graph before the first pass is what AOTAutograd traces, taken apart by the
compiler's decompositions (`passes.tracing`).
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import GraphModule

from passes.analysis.block_chain import FindBlocks
from passes.analysis.describe import Describe
from passes.analysis.find_operations import FindOperations
from passes.analysis.flops import FLOPS, Flops
from passes.analysis.loop_body import AdoptStages, DescribeBody
from passes.analysis.saved import TorchCut
from passes.analysis.shapes import SHAPES, Shapes
from passes.analysis.stages import FindStages
from passes.analysis.tape import MakeTape
from passes.base import Pass
from passes.graph.annotated import Annotated
from passes.graph.decision import Decision
from passes.graph.interface import GraphInput
from passes.graph.keys import INTERFACE, OPERATIONS
from passes.graph.placement_graph import InputKind
from passes.graph.stages import Stages
from passes.keeping.keys import TAPE, KeptNodes
from passes.machine.device import Device
from passes.manager import PassManager
from passes.partition.decide import Adopt, Decide, Obey
from passes.partition.entities import Pin
from passes.partition.keep import AdoptKept, Keep
from passes.partition.meshes import Conditions
from passes.partition.obey_kept import ObeyKept
from passes.records import FrozenMap
from passes.transform.apart import Apart
from passes.transform.before_partition import InductorJoint, TagPhases
from passes.transform.bucket import Bucket
from passes.transform.channels_last import ChannelsLast
from passes.transform.collectives import MeshGroups
from passes.transform.deduplicate import Deduplicate
from passes.transform.early import Early
from passes.transform.gather_ahead import GatherAhead
from passes.transform.normalize import Normalize
from passes.transform.offload import Offload
from passes.transform.once_before_loop import OnceBeforeLoop
from passes.transform.one_microbatch import OneMicrobatch
from passes.transform.own_gradients import OwnGradients
from passes.transform.rematerialize import Rematerialize
from passes.transform.shard import Shard
from passes.transform.take_outside import TakeOutside


def before_planning(inputs: Sequence[GraphInput], forward_outputs: int | None, microbatches: int = 1,
                    leaves: bool = True) -> PassManager:
    """From a traced graph to one that can be planned."""
    return PassManager((Normalize(), Shapes(), Flops(), Describe(tuple(inputs), forward_outputs),
                        FindOperations(microbatches, leaves)))


def annotate(gm: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int | None, microbatches: int = 1,
             leaves: bool = True) -> Annotated:
    """Run the passes before planning; `forward_outputs` is None for a forward graph."""
    start = time.perf_counter()
    before_planning(inputs, forward_outputs, microbatches, leaves)(gm)
    return Annotated(gm, inputs, {"annotate": time.perf_counter() - start})


def deciding(conditions: Conditions, mesh: Mapping[str, int] | None, pins: Mapping[str, Pin] | None = None) -> PassManager:
    """From a graph that can be planned to its decision: by a search or, with the `pins` of a plan, as that says.

    What else will be decided (microbatches, stages, what is kept for backward) stands here, each before what reads it.
    """
    pinned = None if mesh is None else FrozenMap(mesh)
    placements = Decide(conditions, pinned) if pins is None else Obey(conditions, pinned, FrozenMap(pins))
    manager = PassManager((placements,))
    manager.check(available=(INTERFACE, OPERATIONS))
    return manager


def taping(tape: MakeTape) -> PassManager:
    """From a joint graph that is ready to be cut to what keeping and rematerializing know of it."""
    return PassManager((*((ChannelsLast(), Apart()) if tape.fuses else ()), Early(), Shapes(), Flops(), tape))


def keeping(forward_outputs: int, keep: Keep) -> PassManager:
    """From there to what is kept of forward under a budget."""
    manager = PassManager((TorchCut(forward_outputs), keep))
    manager.check(available=(TAPE,))
    return manager


def obeying(kept: ObeyKept) -> PassManager:
    """The same, as a saved plan says."""
    manager = PassManager((kept,))
    manager.check(available=(TAPE,))
    return manager


def rematerializing(kept: KeptNodes, folder: str = "") -> PassManager:
    """From a graph with a tape, and what all ranks agreed to keep, to one whose backward computes the rest once more, or
    fetches it from where forward put it. folder: see `Offload`."""
    manager = PassManager((AdoptKept(kept), Rematerialize(), *((Offload(folder),) if kept.offloaded else ())))
    manager.check(available=(TAPE,))
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
    """From a graph that can be planned to one whose step goes through its batch at once, for `passes.transform.microbatches`.
    decision, groups: where a stage has several ranks; no decision where it has one. asks: see `Shard`."""
    shards: tuple[Pass, ...] = () if decision is None or groups is None else (
        Adopt(decision), Shard(groups, asks), Deduplicate())
    manager = PassManager((*shards, OneMicrobatch(), OwnGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(INTERFACE, OPERATIONS))
    return manager


def to_microbatches(decision: Decision, groups: MeshGroups, forward_outputs: int, kept_gradients: Sequence[int],
                    asks: bool = False) -> PassManager:
    """From a graph that can be planned, and a decision with time as its last axis, to one that can be cut at its markers
    (`passes.transform.microbatches`). asks: see `Shard`."""
    manager = PassManager((Adopt(decision), Shard(groups, asks), OnceBeforeLoop(), Deduplicate(),
                           OwnGradients(tuple(kept_gradients), forward_outputs)))
    manager.check(available=(INTERFACE, OPERATIONS))
    return manager


def around_loop(compiler: str) -> PassManager:
    """From what is done before the loop over microbatches, or after it, to what is compiled."""
    return PassManager((Deduplicate(), Bucket(), *((InductorJoint(),) if compiler == "inductor" else ())))


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
    the graph gives what `taken_of` says.
    """
    passes: list[Pass] = [
        Adopt(decision), Shard(groups, asks=compiler == "inductor"), Deduplicate(), TakeOutside(tuple(outside)),
        Bucket(soon=compact, by_block=by_block), GatherAhead(ahead=ahead),
        OwnGradients(tuple(kept_gradients), forward_outputs or 0, compact)]
    if compiler == "inductor":
        passes.append(InductorJoint())
    elif forward_outputs is not None:
        passes.append(TagPhases(forward_outputs))
    manager = PassManager(tuple(passes))
    manager.check(available=(INTERFACE, OPERATIONS))
    return manager


def describing_body(kinds: Mapping[str, InputKind], forward_outputs: int) -> PassManager:
    """From the body of a loop over microbatches to what `staging` takes."""
    return PassManager((Shapes(), Flops(), DescribeBody(FrozenMap(kinds), forward_outputs)))


def staged_as(stages: Stages) -> PassManager:
    """From there to the same with stages that are known."""
    return PassManager((AdoptStages(stages),))


def staging(count: int, device: Device, starts: tuple[str, ...] = ()) -> PassManager:
    """From a graph that can be planned to one that says into which stages it can be split (`passes.transform.split_stages`).
    starts: as `FindStages` takes them."""
    manager = PassManager((FindBlocks(), FindStages(count, device, starts)))
    manager.check(available=(SHAPES, FLOPS, INTERFACE))
    return manager
