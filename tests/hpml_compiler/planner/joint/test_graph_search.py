"""A step that fits without stages -> stages only where measured prices say that they gain 5 %, and no search where none can."""
from __future__ import annotations

import logging

import pytest

from hpml_compiler.options import Options
from hpml_compiler.planner.captured_model import CapturedModel
from hpml_compiler.planner.graph import measured_costs
from hpml_compiler.planner.graph.memory_budget import StepContext
from hpml_compiler.planner.joint import graph_search
from hpml_compiler.planner.joint.graph_search import faster_configurations
from hpml_compiler.planner.offline_planner import plan_traces
from hpml_compiler.planner.step_decision import pinned_by
from passes.tracing.joint_trace import trace
from tests.helpers.measured_nodes import FAST_US, PINS, SLOW_US, measure
from tests.hpml_compiler.compile.test_open_graph import GPT, batch


@pytest.mark.parametrize(("collective_us", "costs", "ranks", "searches"), [
    (SLOW_US, "measured", 1, True), (SLOW_US, "roofline", 1, False), (SLOW_US, "measured", 2, False),
    (FAST_US, "measured", 1, False)])
def test_stages_that_are_not_needed(collective_us, costs, ranks, searches, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path))
    cluster = measure(collective_us)
    if ranks > 1:  # share the CPU of a host
        monkeypatch.setattr(measured_costs, "local_ranks", lambda: ranks)
    searched = []
    make = graph_search.joint_search_of
    monkeypatch.setattr(graph_search, "joint_search_of", lambda *given: searched.append(given) or make(*given))
    (traced,) = trace(model := GPT(96, 2), (batch(16, 64),), "eager")
    pins = PINS if searches else {**PINS, "microbatches": "auto"}
    options = Options.parse({**pins, "costs": costs})
    sizes = {name: 4.0 * p.numel() for name, p in model.named_parameters()}
    captured = CapturedModel(traced, options, sizes, StepContext.unlimited("graph_0", options, "cpu"))
    (record,) = plan_traces(captured, cluster).graphs
    with caplog.at_level(logging.INFO, "hpml"):
        found = faster_configurations(captured, cluster, record)
    assert bool(found) == bool(searched) == searches
    assert any("stages gain less than 5 %" in each for each in caplog.messages) == (collective_us == FAST_US)
    for each in found:
        assert each.mesh == {"pp": 2} and "by measured prices" in each.reason
        made = each.options(options)
        assert (made.mesh, made.microbatches) == ({"pp": 2}, 4)
        assert pinned_by(made) == {"microbatches"}  # what was chosen is not shown as pinned


def test_an_axis_that_was_pinned_stays_pinned_beside_one_that_was_chosen():
    made = Options.parse({"mesh": {"pp": 2}}).with_chosen({"mesh": {"pp": 2, "dp": 2}, "microbatches": 4})
    assert pinned_by(made) == {"stages"} and made.chosen == {"mesh", "dp", "microbatches"}
    assert pinned_by(made.model_copy(update={"gather": "once"})) == {"stages", "gathers"}
