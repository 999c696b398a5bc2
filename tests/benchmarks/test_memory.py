"""Memory benchmarks on small models without inductor -> points and their comparison."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def lines(script: str, *arguments: str) -> list[dict]:
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), "--compiler", "eager", *arguments], capture_output=True,
                          text=True, timeout=115)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_frontier_of_a_small_gpt():
    (found,) = lines("memory_frontier.py", "--small", "--model", "gpt_memory", "--rounds", "1", "--budgets", "2")
    points = {point["contender"]: point for point in found["points"]}
    ours = [point for point in found["points"] if point["budget_mib"]]
    assert {"eager", "inductor", "activation_memory_budget 0.5", "checkpoint"} == set(found["met"]) and len(ours) >= 3
    assert all(point["total_mib"] <= 1.03 * point["budget_mib"] for point in ours)
    assert all(point["losses_apart"] < 1e-5 and point["step_s"] > 0 for point in found["points"])
    assert min(point["above_state_mib"] for point in ours) < 0.9 * points["inductor"]["above_state_mib"]


def test_budgets_down_to_the_least():
    (found,) = lines("memory_budgets.py", "--cases", "gpt_memory_small", "--shares", "0.95", "0.3")
    assert [point.get("least", False) for point in found["points"]] == [False, True]
    assert found["worst"]["total_to_budget"] <= 1.03 and found["worst"]["predicted_off"] <= 0.05
    assert found["worst"]["losses_apart"] == 0.0
