"""Peak memory of a step by part, for graphs whose activation checkpointing was decided under a memory budget."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan, PeakRecord
from hpml_compiler.plans.memory_records import PARTS, Peak
from hpml_compiler.plans.schema import GraphPlan, ParameterPlan


def counted_peak(graphs: Sequence[GraphPlan]) -> Peak | None:
    """The memory peak of a step that runs forward of these graphs in order and backward in reverse; None unless each of them
    has a checkpointing plan (`GraphPlan.kept`)."""
    kept = [graph.kept for graph in graphs if graph.kept is not None]
    if not kept or len(kept) < len(graphs):
        return None
    state = _state(graphs)
    moments = [_moment(graph, each, state, kept, number, backward) for number, (graph, each) in enumerate(zip(graphs, kept))
               for backward in (False, True)]
    return max((*moments, _optimizer(state, kept)), key=lambda moment: moment.bytes)


def peak_of_stages(graph: GraphPlan, kept: Sequence[CheckpointingPlan], state: Mapping[str, int]) -> Peak:
    """The memory peak of a rank that runs these stages of a graph. state: bytes of its parameters and optimizer state."""
    moments = [_moment(graph, each, state, [each], 0, backward) for each in kept for backward in (False, True)]
    return max((*moments, _optimizer(state, kept[-1:])), key=lambda moment: moment.bytes)


def _optimizer(state: Mapping[str, int], kept: Sequence[CheckpointingPlan]) -> Peak:
    """Memory during the optimizer step. It is read from the graph compiled last, whose plan knows of all graphs before it."""
    rest = max(kept[-1].step_bytes - sum(state.values()), 0)
    gradients = min(rest, sum(each.gradient_bytes for each in kept))
    parts = {**state, "gradients": gradients, "transient": rest - gradients}
    return Peak(parts=_shown(parts), node="optimizer", phase="optimizer")


def _moment(graph: GraphPlan, kept: CheckpointingPlan, state: Mapping[str, int], of_step: Sequence[CheckpointingPlan],
            number: int,
            backward: bool) -> Peak:
    """Memory peak of one graph's forward or backward, plus the activations saved by the graphs before it and, in backward, the
    gradients of the graphs after it."""
    at: PeakRecord = kept.backward if backward else kept.forward
    parts = {**at.parts, **state}
    parts["saved"] = parts.get("saved", 0) + sum(other.saved_bytes for other in of_step[:number])
    if backward:
        parts["gradients"] = parts.get("gradients", 0) + sum(other.gradient_bytes for other in of_step[number + 1:])
    phase = "recompute" if at.again else "backward" if backward else "forward"
    return Peak(parts=_shown(parts), graph=graph.name, node=at.node, block=at.block, phase=phase)


def _shown(parts: Mapping[str, int]) -> dict[str, int]:
    return {part: parts[part] for part in PARTS if parts.get(part)}


def _state(graphs: Sequence[GraphPlan]) -> dict[str, int]:
    """Bytes of sharded parameters, of their unsharded copies and of the optimizer state. A parameter that several graphs use
    counts once."""
    parameters, gathered, optimizer = 0.0, 0.0, 0.0
    seen: set[str] = set()
    for graph in graphs:
        new = [each for name, each in graph.parameters.items() if name not in seen]
        seen.update(graph.parameters)
        stored = _bytes(new)
        parameters += stored
        if stored:
            gathered += max(graph.memory.parameters - _bytes(graph.parameters.values()), 0) * stored / _bytes(
                graph.parameters.values())
        if trained := _bytes(each for each in graph.parameters.values() if each.trainable):
            optimizer += graph.memory.optimizer * _bytes(each for each in new if each.trainable) / trained
    return {"parameters": round(parameters), "gathered": round(gathered), "optimizer": round(optimizer)}


def _bytes(parameters: Iterable[ParameterPlan]) -> int:
    return sum(each.bytes_per_device for each in parameters)
