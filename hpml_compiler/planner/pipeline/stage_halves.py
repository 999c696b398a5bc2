"""Split the body of a microbatch loop into pipeline stages, and each stage into forward and backward.

Computations around the loop are in no stage. So values that a microbatch reads are inputs of the body, and random numbers,
which are drawn before the loop, are the same on all ranks. A run and an offline plan split in the same way.
"""
from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from hpml_compiler.planner.checkpointing.checkpointed_halves import cut_as_kept
from passes import compat
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.errors import BadInput, HpmlError
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.graph.loops.loop_parts import LoopInput, LoopSplit
from passes.graph.placement_graph import InputKind
from passes.hardware.device import Device
from passes.op_rules.recomputable import uses_rng
from passes.pipeline.stage_assignment import STAGES, StageAssignment
from passes.presets import adopting_stages, analyzing_stage_body, building_storage_program, finding_stages, one_stage
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.transforms.loss_chunks.chunk_loss import Chunks
from passes.transforms.pipeline.backward_split import split_backward, weight_part_last
from passes.transforms.pipeline.stage_graphs import StageGraph, makers_of_gradients, split_stages
from passes.transforms.pipeline.stage_io import StageHalves, half_of

FindsStages = Callable[..., StageAssignment]
"""Finds the stages of a body; with the first block of each stage but stage 0 as an argument, those."""


@dataclass(frozen=True)
class StagedBody:
    """A loop body in stages. reads: sources of its inputs in the full graph, by name. outputs, gradients: the stages that make
    the results of its forward and its backward, by place; several stages make summands, in the order in which these are added.
    """

    stages: StageAssignment
    graphs: tuple[StageGraph, ...]
    reads: Mapping[str, LoopInput]
    outputs: Mapping[int, int]
    gradients: Mapping[int, tuple[int, ...]]


def stage_body(marked: GraphModule, kinds: Mapping[str, InputKind], loop: LoopSplit, count: int, device: Device,
               agreed: Callable[[FindsStages], StageAssignment], starts: tuple[str, ...] = (),
               repeats: LoopGathers = ONCE, chunks: Chunks = 1, ranks: tuple[int, ...] = (),
               speeds: tuple[float, ...] = ()) -> StagedBody:
    """marked: the graph that the loop was cut out of, with the kinds of its inputs. agreed: makes ranks agree on the stages
    that one of them finds. starts: first block of each stage but stage 0, if known. repeats: collectives of parameters that
    each microbatch runs. chunks: of the loss. ranks: of the stages. speeds: of the ranks, where unequal."""
    body = copy_graph(loop.body)
    for node in body.graph.nodes:
        if uses_rng(node):
            raise HpmlError(
                "a pipeline stage draws random numbers whose order depends on computed values, so they would differ from one "
                "device's", node.name, "draw them independently of computed values, or remove pp from options['mesh']")
    analyzing_stage_body(_kinds(body, marked, kinds, loop), len(loop.forward))(body)

    def found(begins: tuple[str, ...] = starts) -> StageAssignment:
        finding_stages(count, device, begins, ranks, speeds)(body)
        return read(STAGES, body)

    adopting_stages(agreed(found))(body)
    names = [node.name for node in body.graph.find_nodes(op="placeholder")]
    graphs = tuple(replace(graph, repeats=repeats, chunks=chunks) for graph in split_stages(body, (), aligned=False))
    _check_sizes(graphs)
    return StagedBody(
        read(STAGES, body), graphs, dict(zip(names, (*loop.reads, *loop.late), strict=True)),
        {place: graph.index for graph in graphs for place in graph.outputs}, makers_of_gradients(body))


def _check_sizes(graphs: Sequence[StageGraph]) -> None:
    """Raises BadInput where the size of a received value is not constant."""
    for graph in graphs:
        for name, fake in graph.fakes.items():
            if any(not isinstance(size, int) for size in fake.shape):
                raise BadInput(f"pipeline stage {graph.index} would send or receive a tensor with a data-dependent shape: "
                               f"{tuple(fake.shape)}", name, "give it a fixed shape, or remove pp from options['mesh']")


def structure_of(body: GraphModule) -> str:
    """Text of a body that is the same on all ranks, whatever their local shapes: names of its calls and of their inputs."""
    return "\n".join(f"{node.name} = {node.target} {[x.name for x in node.all_input_nodes]}" for node in body.graph.nodes
                     if node.op == "call_function")


def _kinds(body: GraphModule, marked: GraphModule, kinds: Mapping[str, InputKind], loop: LoopSplit) -> dict[str, InputKind]:
    """Kinds of a body's inputs: values made of parameters before the loop count as parameters."""
    learned: set[str] = set()
    for node in marked.graph.nodes:
        given = kinds.get(node.name) == "parameter" or getattr(node.meta.get("val"), "requires_grad", False)
        if node.op == "placeholder" and given or any(x.name in learned for x in node.all_input_nodes):
            learned.add(node.name)
    found: dict[str, InputKind] = {}
    for k, (node, each) in enumerate(zip(body.graph.find_nodes(op="placeholder"), (*loop.reads, *loop.late), strict=True)):
        late = k >= len(loop.reads)
        found[node.name] = "tangent" if late else "parameter" if each.name in learned else kinds.get(each.name, "constant")
    return found


@dataclass(frozen=True)
class StageSplit:
    """Split of a stage into forward and backward under a budget. kept: its checkpointing decision. builder: the pass that
    builds its storage program. folder: for offloaded activations."""

    kept: CheckpointDecision
    builder: BuildStorageProgram
    folder: str = ""


def joint_of_stage(graph: StageGraph, compiler: str) -> GraphModule:
    """A copy of a stage's joint graph, ready to be partitioned."""
    joint = copy_graph(graph.gm)
    one_stage(compiler, graph.forward_outputs, graph.repeats, chunks=graph.chunks)(joint)
    return joint


def counted_stage(graph: StageGraph, compiler: str, splits_backward: bool, builder: BuildStorageProgram) -> GraphModule:
    """The same with its storage program, in which the two parts of backward follow each other."""
    joint = joint_of_stage(graph, compiler)
    if splits_backward:
        weight_part_last(joint, len(graph.own_sent_back))
    building_storage_program(builder)(joint)
    return joint


def base_names(joint: GraphModule, names: Container[str]) -> frozenset[str]:
    """Names of all calls of a joint graph that write the same memory as one of `names`, of which some are views."""
    saved = {memory_of(node) for node in joint.graph.nodes if node.name in names} - {None}
    return frozenset(node.name for node in joint.graph.nodes if memory_of(node) in saved)


def halves_of(graph: StageGraph, compiler: str, splits_backward: bool = False, split: StageSplit | None = None) -> StageHalves:
    """split: under a memory budget; without one, the values that are saved are the fewest bytes."""
    if split is not None:
        joint = counted_stage(graph, compiler, splits_backward, split.builder)
        forward, whole = cut_as_kept(joint, split.kept, graph.forward_outputs, split.folder)
    else:
        joint = joint_of_stage(graph, compiler)
        if len(returned_nodes(joint)) == graph.forward_outputs:
            return StageHalves(half_of(joint), None, None, {})
        given = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        # The partition that saves least, with either compiler: saved values of many microbatches are in memory at once.
        forward, whole = compat.min_cut_partition(joint, given, graph.forward_outputs, None)
    parts = split_backward(whole, len(graph.gradients)) if splits_backward else (whole, None)
    backward, weight = (None if part is None else half_of(part) for part in parts)
    made = {node.name: node for node in returned_nodes(forward)[graph.forward_outputs:] if node is not None}
    taken = dict.fromkeys(name for half in (backward, weight) if half is not None for name in half.takes)
    return StageHalves(half_of(forward), backward, weight, {name: made[name].meta["val"] for name in taken if name in made})
