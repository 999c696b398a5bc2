"""Memory of a step over time, by part: its graphs' own memory, put together with parameters and optimizer state.

For graphs whose activation checkpointing was decided under a memory budget, a plan has that memory; for others,
`hpml_compiler.simulate.memory_timeline` makes it of the plan's operations.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.memory_records import PARTS, Peak
from hpml_compiler.plans.schema import GraphPlan, OperationPlan, ParameterPlan
from passes.op_rules.dim_texts import BATCH_ROLE, parse_dims

VERSIONS = 2
"""Copies of two steps are kept: that of one until all ranks have that of the next."""


@dataclass(frozen=True)
class GraphTimeline:
    """Memory of one graph without parameters and optimizer state: wherever it changes in forward and in backward; the bytes
    that it saves in between; and those of its gradients. step_bytes: during the optimizer step, everything included, for the
    graphs up to this one; None if unknown."""

    forward: tuple[Peak, ...]
    backward: tuple[Peak, ...]
    saved_bytes: int
    gradient_bytes: int
    step_bytes: int | None = None


def counted_peak(graphs: Sequence[GraphPlan]) -> Peak | None:
    """The memory peak of a step that runs forward of these graphs in order and backward in reverse; None unless each of them
    has a checkpointing plan (`GraphPlan.kept`)."""
    kept = [counted_timeline(graph, graph.kept) for graph in graphs if graph.kept is not None]
    return fullest_moment(step_moments(graphs, kept)) if kept and len(kept) == len(graphs) else None


def fullest_moment(moments: Iterable[Peak]) -> Peak:
    """The first with the most bytes."""
    return max(moments, key=lambda moment: moment.bytes)


def counted_timeline(graph: GraphPlan, kept: CheckpointingPlan) -> GraphTimeline:
    """The memory of a graph as counted when its activation checkpointing was decided."""
    return GraphTimeline(_recorded(graph, kept, False), _recorded(graph, kept, True), kept.saved_bytes, kept.gradient_bytes,
                         kept.step_bytes)


def _recorded(graph: GraphPlan, kept: CheckpointingPlan, backward: bool) -> tuple[Peak, ...]:
    at, memory = (kept.backward, kept.backward_memory) if backward else (kept.forward, kept.forward_memory)
    phase = "backward" if backward else "forward"
    if not memory.nodes:
        return (Peak(parts=at.parts, graph=graph.name, node=at.node, block=at.block, phase="recompute" if at.again else phase),)
    found = []
    for node, parts in memory.moments():
        listed = graph.operations.get(node)
        block = at.block if node == at.node else "" if listed is None else listed.block
        again = backward and node in kept.again
        found.append(Peak(parts=parts, graph=graph.name, node=node, block=block, phase="recompute" if again else phase))
    return tuple(found)


def step_moments(graphs: Sequence[GraphPlan], timelines: Sequence[GraphTimeline], update_bytes: float = 0.0) -> list[Peak]:
    """Bytes by part wherever they change in a step that runs forward of these graphs in order, backward in reverse, and the
    optimizer. The first moment is what is in memory all the time. update_bytes: of temporary tensors of the optimizer, where
    the last graph's memory does not tell."""
    state = _state(graphs)
    state["gradients"] = sum(max(round(graph.memory.gradients) - each.gradient_bytes, 0)  # of no operation that a plan lists
                             for graph, each in zip(graphs, timelines, strict=True) if each.step_bytes is None)
    found = [Peak(parts=_sum(state, {}), phase="start")]
    for backward in (False, True):
        for number in reversed(range(len(graphs))) if backward else range(len(graphs)):
            others = {"saved": sum(each.saved_bytes for each in timelines[:number]),
                      "gradients": backward * sum(each.gradient_bytes for each in timelines[number + 1:])}
            own = timelines[number].backward if backward else timelines[number].forward
            found += (moment.model_copy(update={"parts": _sum(moment.parts, others, state)}) for moment in own)
    return [*found, _optimizer(state, timelines, update_bytes)]


def peak_of_stages(graph: GraphPlan, kept: Sequence[CheckpointingPlan], state: Mapping[str, int]) -> Peak:
    """The memory peak of a rank that runs these stages of a graph. state: bytes of its parameters and optimizer state."""
    stages, optimizer = stage_moments(graph, kept, state)
    return fullest_moment([*(moment for stage in stages for moment in stage), optimizer])


def stage_moments(graph: GraphPlan, kept: Sequence[CheckpointingPlan], state: Mapping[str, int],
                  ) -> tuple[list[tuple[Peak, Peak]], Peak]:
    """The peaks of forward and of backward of each of a rank's stages, and the optimizer's moment."""
    timelines = [counted_timeline(graph, each) for each in kept]

    def fullest(moments: Sequence[Peak]) -> Peak:
        moment = fullest_moment(moments)
        return moment.model_copy(update={"parts": _sum(moment.parts, state)})

    stages = [(fullest(each.forward), fullest(each.backward)) for each in timelines]
    return stages, _optimizer(state, timelines[-1:], 0.0)


def _optimizer(state: Mapping[str, int], timelines: Sequence[GraphTimeline], update_bytes: float) -> Peak:
    """Memory during the optimizer step. Where it is known, that is from the graph compiled last, whose plan knows of all graphs
    before it."""
    gradients, known = sum(each.gradient_bytes for each in timelines), timelines[-1].step_bytes if timelines else None
    rest = gradients + round(update_bytes) if known is None else max(known - sum(state.values()), 0)
    gradients = min(rest, gradients)
    return Peak(parts=_sum(state, {"gradients": gradients, "transient": rest - gradients}), node="optimizer", phase="optimizer")


def _sum(*several: Mapping[str, int]) -> dict[str, int]:
    """Sums by part, in the order in which parts are shown, without empty ones."""
    sums = {part: sum(each.get(part, 0) for each in several) for part in PARTS}
    return {part: nbytes for part, nbytes in sums.items() if nbytes}


def _state(graphs: Sequence[GraphPlan]) -> dict[str, int]:
    """Bytes of sharded parameters, of their unsharded copies and of the optimizer state. A parameter that several graphs use
    counts once."""
    parameters, gathered, optimizer, copies = 0.0, 0.0, 0.0, 0.0
    seen: set[str] = set()
    for graph in graphs:
        new = [each for name, each in graph.parameters.items() if name not in seen]
        seen.update(graph.parameters)
        stored = _bytes(new)
        parameters += stored
        if stored:
            new_part = stored / _bytes(graph.parameters.values())
            gathered += max(graph.memory.parameters - _bytes(graph.parameters.values()), 0) * new_part
            copies += graph.memory.copies * new_part
        if trained := _bytes(each for each in graph.parameters.values() if each.trainable):
            optimizer += graph.memory.optimizer * _bytes(each for each in new if each.trainable) / trained
    return {"parameters": round(parameters), "gathered": round(gathered), "optimizer": round(optimizer),
            "copies": round(copies)}


def copies_bytes(parameters: Iterable[ParameterPlan], states: float, redundancy: int, ranks: int) -> int:
    """Bytes of a rank for copies of these parameters and of their optimizer state (`redundancy`): of its own, and of what other
    ranks send it. ranks: number of those that have a part of each parameter. states: of the optimizer, per parameter. 0 where
    more ranks than `redundancy` have each part: none is sent, then, and none is kept."""
    sent = kept = 0.0
    for each in parameters:
        nbytes = each.bytes_per_device * (1 + states * each.trainable)
        if round(ranks * each.bytes_per_device / max(each.bytes_whole, 1)) <= redundancy:
            sent += nbytes
        else:
            kept += nbytes
    return round(VERSIONS * ((1 + redundancy) * sent + kept)) if sent else 0


def fixed_values(graph: GraphPlan) -> frozenset[str]:
    """Values whose size does not depend on the rows: parameters, and results of forward that depend on parameters only. Random
    numbers depend on no rows, but have some: with microbatches, what is not once in a step or repeated for parameters does;
    else what has a dim of the batch."""
    said, found = graph.microbatches, set(graph.parameters)
    whole = None if said is None else {*said.before, *said.repeated, *said.whole}
    for name, operation in graph.operations.items():
        if not operation.backward and all(source in found for source in operation.sources) and (
                name in whole if whole is not None else not _has_batch_dim(operation)):
            found.add(name)
    return frozenset(found)


def _has_batch_dim(operation: OperationPlan) -> bool:
    return any(role == BATCH_ROLE for made in operation.dims for dim in parse_dims(made) for _, role in dim)


def _bytes(parameters: Iterable[ParameterPlan]) -> int:
    return sum(each.bytes_per_device for each in parameters)
