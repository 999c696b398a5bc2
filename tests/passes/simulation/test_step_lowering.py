"""Step graphs -> what one rank runs, in order."""
from __future__ import annotations

from passes.graph.step_phase import BACKWARD, FORWARD
from passes.simulation.rank_program import OFFLOAD
from passes.simulation.step_graph import StepCall, StepGraph
from passes.simulation.step_lowering import lower_step


def test_an_offloaded_value_of_all_microbatches_is_copied_once_each_way():
    calls = (
        StepCall("mask", FORWARD, "", 1.0, offload_us=8.0, when="before"),
        StepCall("product", FORWARD, "", 1.0, (("mask", 0),), offload_us=2.0),
        StepCall("gradient", BACKWARD, "", 1.0, (("mask", 0), ("product", 0))),
    )
    for at_once in (True, False):
        entries = lower_step([StepGraph("graph", True, calls, microbatches=3, at_once=at_once)]).entries
        copies = [(each.name, each.us) for each in entries if each.kind == OFFLOAD]
        assert sorted(copies) == [("copy mask back", 4.0), ("copy mask to the host", 4.0),
                                  *[("copy product back", 1.0)] * 3, *[("copy product to the host", 1.0)] * 3]
