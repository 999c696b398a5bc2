"""Calls before -> samples after: turns, rounds, ranks."""
from __future__ import annotations

import time

import pytest

from hpml_compiler.profile.runtime_overhead import COLLECTIVES, FEW, LINKS, MANY, RuntimeOverhead
from hpml_compiler.profile.timing import FEWEST_ROUNDS, TimedCall, as_measurement, in_rounds


def test_calls_take_turns():
    seen: list[str] = []
    calls = {name: TimedCall(lambda name=name: seen.append(name), repeats=2, samples=3, warm=1) for name in "ab"}
    samples = in_rounds(calls, 0.0)
    assert "".join(seen) == "aaaaaaabbbbbbb" * FEWEST_ROUNDS
    assert {name: len(us) for name, us in samples.items()} == dict.fromkeys("ab", 3 * FEWEST_ROUNDS)


def test_a_call_is_left_out_after_its_rounds():
    seen: list[str] = []
    calls = {"few": TimedCall(lambda: seen.append("f"), rounds=2), "all": TimedCall(lambda: seen.append("a"))}
    samples = in_rounds(calls, 0.0)
    assert "".join(seen) == "fafa" + "a" * (FEWEST_ROUNDS - 2)
    assert {name: len(us) for name, us in samples.items()} == {"few": 2, "all": FEWEST_ROUNDS}


def test_a_sample_is_the_mean_of_its_calls_and_time_is_kept_to():
    began = time.perf_counter()
    samples = in_rounds({"nap": TimedCall(lambda: time.sleep(2e-3), repeats=5)}, 0.3)
    assert min(samples["nap"]) >= 2e3 and 0.25 < time.perf_counter() - began < 3.0


def test_a_measurement_has_median_number_and_spread():
    found = as_measurement([10.0] * 8 + [12.0, 20.0])
    assert (found.median_us, found.runs) == (10.0, 10) and found.spread == pytest.approx(1.2)


def test_overheads_are_what_is_left_of_tiny_steps_and_of_a_chain():
    """hpml takes 30 us more per graph call, 2 per parameter; a collective 50 more in the chain than alone."""
    us = {f"inductor {n}": 100.0 * n for n in (FEW, MANY)}
    us |= {f"hpml {n}": 100.0 * n + 2 * 30 + 2 * n * 2 for n in (FEW, MANY)}
    us |= {"products": 1000.0, "chain": 1000.0 + LINKS * (400 + 50), COLLECTIVES[0]: 500.0, COLLECTIVES[1]: 300.0}
    assert RuntimeOverhead.of(us) == RuntimeOverhead(pytest.approx(30), pytest.approx(2), pytest.approx(50))


def _times(rank: int) -> dict[str, list[float]]:
    calls = {"nap": TimedCall(lambda: time.sleep(1e-3 * (1 + 4 * rank))), "both": TimedCall(lambda: None)}
    if rank:
        calls["one rank's own"] = TimedCall(lambda: None)
    return in_rounds(calls, 0.0)


def test_of_several_ranks_the_slowest_counts(launch):
    first, second = launch(_times, 2)
    assert first == second and set(first) == {"nap", "both"}
    assert min(first["nap"]) >= 5e3
