"""Models and batches that replicas cannot train apart -> refused when they are planned, with the operation or the result."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from passes.errors import BadInput

WIDTH = 8


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "BatchNorm" else nn.LayerNorm(WIDTH)
        self.per_row, self.head = nn.Parameter(torch.ones(6, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(self.up(x)))
        if self.kind == "weights in the loss":
            return self.head(y).square().mean() + self.up.weight.square().sum()
        if self.kind == "parameters of rows":
            return self.head(y * self.per_row).square().mean()
        if self.kind == "a head on the mean row":
            return self.head(y.mean(0)).square().mean()
        if self.kind == "sorted rows":
            return (self.head(y).sum(1).cumsum(0)).square().mean()
        return self.head(nn.functional.dropout(y, 0.1)).square().mean()


def plan(kind: str, rows: int = 6, outer: str = "average") -> object:
    return hpml_compiler.plan(Net(kind), (torch.zeros(rows, WIDTH),), cluster="2x1:h100-80g", mesh={"dp": 2},
                              local_steps={"dp": 4}, outer_optimizer=outer)


@pytest.mark.parametrize("kind, message", [
    ("weights in the loss", "would have different values"),
    ("parameters of rows", "a parameter of shape 6 x 8 has rows of the batch"),
    ("a head on the mean row", "would have different values"),
    ("BatchNorm", "needs a sum over all rows, as BatchNorm does"),
    ("sorted rows", "is not computed row by row"),
])
def test_refused(kind, message):
    with pytest.raises(BadInput, match=message) as caught:
        plan(kind)
    assert "local_steps" in caught.value.where


def test_rows_must_divide():
    with pytest.raises(BadInput, match="is not computed row by row"):
        plan("plain", 7)


def test_the_plan_says_it_and_counts_a_share_of_the_bytes():
    found = plan("plain")
    hops = [hop for move in found.step_graphs[0].redistributions for hop in move.hops if hop.compression]
    assert {hop.compression for hop in hops} == {"local:4"}
    assert all(hop.bytes == max(1, round(hop.whole_bytes / 4)) for hop in hops)
    assert "parameters averaged every 4 steps" in found.table(100)


def test_the_state_of_the_outer_optimizer_is_memory():
    """Two tensors of each parameter's size, beside AdamW's two."""
    without, outer = (plan("plain", outer=name).step_graphs[0].memory for name in ("average", "nesterov"))
    assert outer.optimizer == 2 * without.optimizer and outer.peak - without.peak == without.optimizer
