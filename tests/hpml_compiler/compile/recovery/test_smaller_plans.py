"""Plans to try after one ran out of memory: budgets, microbatches, offloading, and the least that was named."""
from __future__ import annotations

import pytest
import torch

from hpml_compiler.compile.recovery import smaller_plans
from hpml_compiler.compile.recovery.smaller_plans import SmallerPlans
from hpml_compiler.options import Options
from passes.errors import Infeasible

MIB = 1 << 20


def needs(nbytes):
    error = Infeasible("the step needs more")
    error.smallest_budget_bytes = nbytes
    return error


def test_refusals_lead_to_microbatches_then_offloading_then_the_least(monkeypatch):
    monkeypatch.setattr(smaller_plans, "room_bytes", lambda: 100 * MIB)
    plans = SmallerPlans("graph_0", Options.parse({}), 5 * MIB, lambda: None)
    found = [plans.next("it ran out of memory")]
    for least in (140, 130, 120, 125, 150):
        found.append(plans.after_refusal(needs(least * MIB), "it ran out of memory"))
    assert [each.memory_budget for each in found[:5]] == [100 * MIB] * 5
    assert [each.microbatches for each in found] == [1, 2, 4, 8, 1, 4]
    assert [each.offload for each in found] == ["off"] * 4 + ["saved", "off"]
    assert found[5].memory_budget == 120 * MIB + 1
    with pytest.raises(torch.OutOfMemoryError, match="ran out of memory, and fits under none of these plans: a memory_budget of"
                                                     " 100 MiB; .*8 microbatches.*needs more"):
        plans.after_refusal(needs(121 * MIB), "it ran out of memory")


@pytest.mark.parametrize(("room", "peak", "budget"), [
    (100, 200, 100),  # the measured room is less than was predicted
    (100, 100, 81),  # the prediction was too low: a fifth less besides the 5 MiB that are held
    (100, None, 100)])
def test_the_budget_follows_from_what_was_measured(monkeypatch, room, peak, budget):
    monkeypatch.setattr(smaller_plans, "room_bytes", lambda: room * MIB)
    plans = SmallerPlans("graph_0", Options.parse({}), 5 * MIB, lambda: peak and peak * MIB)
    assert plans.next("it ran out of memory").memory_budget == budget * MIB


def test_plans_end(monkeypatch):
    monkeypatch.setattr(smaller_plans, "room_bytes", lambda: 100 * MIB)
    plans = SmallerPlans("graph_0", Options.parse({}), 0, lambda: 50 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="fits under none"):
        for _ in range(smaller_plans.MOST_PLANS + 1):
            plans.next("it ran out of memory")
