"""A model and a batch before -> joint graphs after; nothing is run, and the model stays as it was."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.errors import BadInput
from passes.tracing.joint_trace import joint_graphs, trace


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_inputs_are_described_in_the_words_of_the_model():
    model = nn.Linear(4, 2, device="meta")
    (traced,) = trace(model, (torch.empty(3, 4, device="meta"),))
    assert {(each.name, each.kind) for each in traced.inputs if each.kind == "parameter"} == {
        ("weight", "parameter"), ("bias", "parameter")}
    assert traced.forward_outputs == 1 and model.weight.is_meta


def test_what_ends_the_call_before_there_is_a_graph_is_raised():
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        joint_graphs(fails, (torch.ones(2, requires_grad=True),))
    with pytest.raises(BadInput, match="no parameters"):
        trace(nn.ReLU(), (torch.ones(2),))


def test_what_goes_wrong_once_there_is_a_graph_is_raised_too():
    def half(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    def fails(x: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            return half(x)
        finally:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        joint_graphs(fails, (torch.ones(2, requires_grad=True),))


def test_the_first_graph_of_a_model_that_breaks_is_there():
    assert len(joint_graphs(Broken(), (torch.ones(2, 4),))) >= 1
