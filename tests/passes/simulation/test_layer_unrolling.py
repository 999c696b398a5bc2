"""Listed calls that stand for many layers -> their runs in order."""
from __future__ import annotations

from passes.graph.step_phase import BACKWARD, FORWARD
from passes.simulation.layer_unrolling import unroll_layers
from passes.simulation.step_graph import StepCall, StepGraph


def test_what_is_listed_in_the_last_layer_runs_there():
    calls = (
        StepCall("first", FORWARD, "h.0", 1.0), StepCall("each", FORWARD, "h.1", 1.0, runs=5),
        StepCall("end", BACKWARD, "h.4", 1.0), StepCall("back", BACKWARD, "h.1", 1.0, runs=4),
        StepCall("begin", BACKWARD, "h.0", 1.0),
    )
    found = unroll_layers(StepGraph("graph", True, calls))
    order = {phase: [(each.call.name, each.layer) for each in runs] for phase, runs in found.items()}
    assert order[FORWARD] == [("first", 0), ("each", 0), ("each", 1), ("each", 2), ("each", 3), ("each", 4)]
    assert order[BACKWARD] == [("end", 4), ("back", 4), ("back", 3), ("back", 2), ("back", 1), ("begin", 0)]
