"""Outputs of models -> only the loss; models without a loss are refused."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpml_compiler.instruments.calibration.loss_only_model import LossOnly

LOSS, LOGITS = torch.tensor(2.5), torch.zeros(4, 3)


class Returns(nn.Module):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def forward(self, x, *, scale=1.0):
        return self.found


@pytest.mark.parametrize("found", [
    LOSS, (LOSS, LOGITS), [LOSS], {"logits": LOGITS, "loss": LOSS}, SimpleNamespace(loss=LOSS, logits=LOGITS),
], ids=["tensor", "tuple", "list", "mapping", "object"])
def test_the_loss_is_what_is_left(found):
    assert LossOnly(Returns(found))(torch.zeros(1), scale=2.0) is LOSS


def test_an_object_without_a_loss_is_refused():
    with pytest.raises(TypeError, match="SimpleNamespace without a loss"):
        LossOnly(Returns(SimpleNamespace(logits=LOGITS)))(torch.zeros(1))
