"""A memory trace -> the peak by part, saved values and recomputed operations."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from passes.simulation.memory.memory_breakdown import report_memory
from passes.simulation.memory.memory_trace import simulate_memory
from tests.passes.checkpointing.storage_programs import chain, random_program


def test_a_chain_that_keeps_its_middle():
    """x -> f0 -> f1 -> f2, of 8 bytes each; b2 reads f2, run again from what is kept of f1; b1 reads f0, run again, and b2."""
    found = report_memory(simulate_memory(chain([8, 8, 8]), {2}))
    assert found.saved == (("f1", "", 8),)
    assert [name for name, _, _ in found.again] == ["f2", "f0"]
    assert found.backward.parts == {"saved": 8, "recomputed": 8, "transient": 16} and found.backward.name == "b1"
    assert found.gradient_bytes == 8


def test_to_keep_all_is_to_recompute_nothing():
    found = report_memory(simulate_memory(chain([8, 8, 8]), {1, 2, 3}))
    assert not found.again and found.backward.parts == {"saved": 24, "transient": 8}
    assert found.forward.parts == {"saved": 24} and not found.forward.again


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_what_the_walk_counts(seed):
    program, draw = random_program(seed), random.Random(seed)
    program = replace(program, runs=tuple(replace(run, workspace_bytes=draw.choice((0, 7)), scratch_bytes=draw.choice((0, 40)))
                                    for run in program.runs))
    free = [s for s in program.candidates if s not in program.bound_to_keep]
    walked = simulate_memory(program, program.bound_to_keep | set(random.Random(seed).sample(free, len(free) // 2)))
    found = report_memory(walked)
    assert sum(found.forward.parts.values()) == max(walked.forward.nbytes)
    assert sum(found.backward.parts.values()) == max(walked.backward.nbytes)
    assert sum(us for _, _, us in found.again) == pytest.approx(sum(program.runs[k].us for k in walked.recomputed))
    assert {name for name, _, _ in found.saved} == {program.storages[s].name for s in walked.saved}
