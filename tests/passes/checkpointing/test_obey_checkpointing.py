"""Saved names of a plan -> the decision with its bytes, or the reason why it is refused."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION
from passes.checkpointing.obey_checkpointing import ObeyCheckpointing
from passes.checkpointing.solve_checkpointing import SolveCheckpointing
from passes.errors import BadInput
from passes.presets import building_storage_program, obeying_checkpointing, solving_checkpointing
from tests.passes.traced import joint_graph


@pytest.fixture
def joint():
    gm, forward_outputs = joint_graph(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)),
                                      torch.ones(16, 8))
    building_storage_program(BuildStorageProgram(forward_outputs))(gm)
    solving_checkpointing(forward_outputs, SolveCheckpointing())(gm)
    return gm


def test_the_same_names_come_to_the_same(joint):
    decided = read(CHECKPOINT_DECISION, joint)
    obeying_checkpointing(ObeyCheckpointing(decided.names, budget_bytes=1.0, after_bytes=10**6))(joint)
    obeyed = read(CHECKPOINT_DECISION, joint)
    assert (obeyed.names, obeyed.backward_bytes, obeyed.account) == (decided.names, decided.backward_bytes, decided.account)
    assert obeyed.after_bytes == decided.after_bytes + 10**6 and not obeyed.fits and obeyed.seconds == 0


def test_what_cannot_be_kept_or_made_again_is_refused(joint):
    names = read(CHECKPOINT_DECISION, joint).names
    random = next(name for name in names if "random" in name or "bernoulli" in name or "gt" in name or "dropout" in name)
    for wrong, message in ((ObeyCheckpointing(names | {"other"}), "finds no other"),
                           (ObeyCheckpointing(names - {random}), "cannot be recomputed"),
                           (ObeyCheckpointing(names, frozenset({random})), "cannot be offloaded")):
        with pytest.raises(BadInput, match=message):
            obeying_checkpointing(wrong)(joint)
