"""Names that a plan keeps -> what that comes to, or why it cannot be obeyed."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.analysis.tape import MakeTape
from passes.annotations import read
from passes.errors import BadInput
from passes.keeping.keys import KEPT
from passes.partition.keep import Keep
from passes.partition.obey_kept import ObeyKept
from passes.presets import keeping, obeying, taping
from tests.passes.traced import joint_graph


@pytest.fixture
def taped():
    gm, forward_outputs = joint_graph(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)),
                                      torch.ones(16, 8))
    taping(MakeTape(forward_outputs))(gm)
    keeping(forward_outputs, Keep())(gm)
    return gm


def test_the_same_names_come_to_the_same(taped):
    decided = read(KEPT, taped)
    obeying(ObeyKept(decided.names, budget_bytes=1.0, after_bytes=10**6))(taped)
    obeyed = read(KEPT, taped)
    assert (obeyed.names, obeyed.backward_bytes, obeyed.account) == (decided.names, decided.backward_bytes, decided.account)
    assert obeyed.after_bytes == decided.after_bytes + 10**6 and not obeyed.fits and obeyed.seconds == 0


def test_what_cannot_be_kept_or_made_again_is_refused(taped):
    names = read(KEPT, taped).names
    random = next(name for name in names if "random" in name or "bernoulli" in name or "gt" in name or "dropout" in name)
    for wrong, message in ((ObeyKept(names | {"other"}), "finds no other"), (ObeyKept(names - {random}), "cannot be computed"),
                           (ObeyKept(names, frozenset({random})), "cannot be offloaded")):
        with pytest.raises(BadInput, match=message):
            obeying(wrong)(taped)
