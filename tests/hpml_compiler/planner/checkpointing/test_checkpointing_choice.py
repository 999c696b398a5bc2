"""Budgets that are too small -> errors with memory by part and the next step."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import choose_checkpointing
from hpml_compiler.planner.graph.memory_budget import BudgetShare
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.errors import Infeasible
from passes.presets import building_storage_program
from tests.passes.traced import joint_graph

ROOM = BudgetShare(budget=10_000, available=9_000.0, between=0.0, after=0.0, state=1_000.0, later=0.0, transient=0.0, remedy="",
                   others={})


def refusal(room: BudgetShare) -> Infeasible:
    gm, forward_outputs = joint_graph(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(16, 8))
    building_storage_program(BuildStorageProgram(forward_outputs))(gm)
    with pytest.raises(Infeasible) as caught:
        choose_checkpointing(gm, forward_outputs, room, Options.parse({}), "'forward' (a.py:9)", strict=True)
    return caught.value


def test_what_other_graphs_keep_is_named():
    found = refusal(replace(ROOM, available=100.0, others={"'forward' (a.py:1)": 5_000.0}))
    assert "saved by 'forward' (a.py:1) (another graph of the step) 4.88 KiB" in found.what
    assert "remove the graph break" in found.next_step


def test_state_that_takes_all_of_it_is_named():
    found = refusal(replace(ROOM, available=-2_000.0, state=12_000.0))
    assert "parameters and optimizer state 11.7 KiB" in found.what and "more devices" in found.next_step
    assert found.smallest_budget_bytes is not None and found.smallest_budget_bytes > 12_000


def test_what_the_optimizer_makes_in_its_step_is_named_with_the_remedy():
    found = refusal(replace(ROOM, after=9_000.0, transient=3_000.0, remedy="give it foreach=False or fused=True"))
    assert "when the optimizer steps" in found.what and "temporary tensors 2.93 KiB" in found.what
    assert found.next_step.startswith("give it foreach=False or fused=True")


def test_room_that_graphs_after_it_would_need_is_taken_if_there_is_no_other_way():
    gm, forward_outputs = joint_graph(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(16, 8))
    building_storage_program(BuildStorageProgram(forward_outputs))(gm)
    kept = choose_checkpointing(gm, forward_outputs, replace(ROOM, between=9_000.0), Options.parse({}), "g", strict=True)
    assert kept.fits
