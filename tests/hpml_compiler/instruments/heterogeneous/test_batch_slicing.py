"""Batches before -> the same batches with fewer rows."""
from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from hpml_compiler.instruments.heterogeneous.batch_slicing import batch_rows, first_rows
from passes.errors import BadInput

Pair = namedtuple("Pair", ["x", "y"])


def test_every_tensor_with_the_rows_is_cut_and_nothing_else():
    scale, mask = torch.ones(3), torch.ones(1, 6)
    batch = {"ids": torch.arange(48).view(8, 6), "pair": Pair(torch.zeros(8), [torch.zeros(8, 2)]), "scale": scale,
             "mask": mask, "scalar": torch.tensor(1.0), "flag": True, "none": None}
    assert batch_rows(batch) == 8
    cut = first_rows(batch, 3)
    assert cut["ids"].tolist() == torch.arange(18).view(3, 6).tolist()
    assert cut["pair"].x.shape == (3,) and cut["pair"].y[0].shape == (3, 2) and isinstance(cut["pair"], Pair)
    assert cut["scale"] is scale and cut["mask"] is mask and cut["flag"] is True and cut["none"] is None
    assert batch["ids"].shape == (8, 6), "the batch itself stays"


def test_most_tensors_decide_and_the_first_breaks_a_tie():
    assert batch_rows((torch.zeros(1, 4), torch.zeros(8, 4), torch.zeros(8))) == 8
    assert batch_rows((torch.zeros(8, 4), torch.zeros(16))) == 8


def test_meta_tensors_stay_there_and_gradients_are_asked_for_as_before():
    x = torch.zeros(8, 4, device="meta", requires_grad=True)
    cut = first_rows((x,), 2)[0]
    assert cut.device.type == "meta" and cut.shape == (2, 4) and cut.requires_grad and cut.is_leaf


def test_all_rows_are_the_batch_itself():
    x = torch.zeros(8, 4)
    assert first_rows(x, 8) is x


@pytest.mark.parametrize(("batch", "rows"), [
    ({"flag": True}, 1), (torch.tensor(1.0), 1), (torch.zeros(8), 0), (torch.zeros(8), 9),
])
def test_refuses(batch, rows):
    with pytest.raises(BadInput):
        first_rows(batch, rows)
