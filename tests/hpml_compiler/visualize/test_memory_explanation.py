"""Plans with and without a budget -> a device's memory, the reasons and the cost, in words."""
from __future__ import annotations

import json

import pytest

from hpml_compiler.simulate import simulate
from hpml_compiler.simulate.simulator import peak_of_plan
from hpml_compiler.visualize.memory_explanation import memory_json, memory_text
from tests.helpers.plans import gpt_plan
from tests.hpml_compiler.plans.test_peak_memory import with_kept
from tests.hpml_compiler.simulate.toy import chain_plan


def budgeted():
    plan = gpt_plan()
    graph = with_kept(plan.graphs[0], {"saved": 10}, {"saved": 2048, "recomputed": 4096}, saved=2048, again=True)
    return plan.model_copy(update={"graphs": (graph,)})


def test_a_budget_is_told_with_what_is_kept_and_what_runs_again():
    plan = budgeted()
    text = " ".join(memory_text(plan, plan.peak).split())
    for said in ("recomputed 4.00 KiB", "fc_0 of h.0, recomputed in backward", "saves 1 value, 2.00 KiB", "gelu_0 (h.0)",
                 "recomputes 1 call of forward", "10.0 us fc_0", "the budget is 1000 B", "exceeded by"):
        assert said in text, text
    found = memory_json(plan, plan.peak)
    assert json.loads(json.dumps(found)) == found and found["peak_bytes"] == sum(found["parts"].values())
    (graph,) = found["graphs"].values()
    assert graph == {"saved": {"gelu_0": 2048}, "offloaded": {}, "recomputed_s": {"fc_0": pytest.approx(10e-6)}}


def test_without_a_budget_the_plan_s_operations_are_counted():
    plan = chain_plan(3)
    found = simulate(plan)
    peak = peak_of_plan(plan)
    assert peak.bytes == found.peak_bytes and peak.node and not peak.counted
    text = memory_text(plan, peak)
    assert "simulated from the plan's operations" in text and "the budget" not in text and "  at " in text


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"microbatches": 2}, {"overlap": False}])
def test_parts_add_up_at_every_moment(options):
    found = simulate(chain_plan(3), **options)
    for us, nbytes in found.memory:
        parts = [next(size for start, size in reversed(curve) if start <= us) for curve in found.parts.values()]
        assert sum(parts) == pytest.approx(nbytes, abs=len(parts))
