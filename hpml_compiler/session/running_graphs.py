"""Graphs of a run that its steps call: a graph that the script's loss has joined, and those for its calls, are replaced."""
from __future__ import annotations

from collections.abc import Sequence

from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.outputs.loss_memory import LossMemories
from passes.session_state import state_of


def as_they_run(graphs: Sequence[GraphPlan]) -> list[GraphPlan]:
    """All graphs, of which those that do not run count as earlier ones of the same frame (`PlanContent.step_graphs`)."""
    for memory in state_of(LossMemories):
        found = {graph.name: graph for graph in graphs}
        parts = [found[name] for name in memory.parts if name in found]
        wholes = [found[name] for name in memory.wholes if name in found]
        if not parts or not wholes:
            continue
        ended, running = ([*parts, *wholes[:-1]], wholes[-1]) if memory.losses else (wholes, parts[0])
        frame = parts[0].frame
        found[running.name] = running.model_copy(update={"frame": frame})
        ended = [found.pop(graph.name).model_copy(update={"frame": frame}) for graph in ended]
        graphs = [*ended, *found.values()]
    return list(graphs)
