"""A decision's bytes -> live bytes at each position."""
from __future__ import annotations

from passes.sharding.oracle.cost_check import DecisionCost
from passes.sharding.oracle.memory_model import STEP_PEAK, MemoryModel

COST = DecisionCost(1.0, 1.0, 1.0, parameter_bytes=10.0, gradient_bytes=11.0, optimizer_bytes=20.0, activation_bytes=100.0)


def test_all_at_once():
    assert STEP_PEAK.positions == ("step",) and STEP_PEAK.of(COST) == (141.0,) == (COST.held_bytes,)


def test_saved_values_and_gradients_are_not_there_at_the_same_time():
    assert MemoryModel(1.0).positions == ("end of forward", "end of backward")
    assert MemoryModel(1.0).of(COST) == (130.0, 41.0)
    assert MemoryModel(0.25).of(COST) == (55.0, 41.0)


def test_parts_add_up_to_the_whole():
    for lifetimes in (STEP_PEAK, MemoryModel(0.5)):
        parts = lifetimes.parameter(30.0, 11.0), lifetimes.saved(100.0), lifetimes.nothing()
        assert tuple(map(sum, zip(*parts, strict=True))) == lifetimes.of(COST)
