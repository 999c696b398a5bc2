"""Where a list of calls is cut -> between the layers, at the sum that they hand on."""
from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from passes.transforms.regional.repeated_regions import repetition_cuts


class Layers(nn.Module):
    def __init__(self, widths: list[int]):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.downs = nn.ModuleList(nn.Linear(width, 8) for width in widths)

    def forward(self, x):
        x = x.exp()
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(x)) * 2 - 1).sin()
        return x.log()


def calls_of(model: nn.Module) -> list:
    gm = make_fx(lambda parameters, x: torch.func.functional_call(model, parameters, x), tracing_mode="fake")(
        dict(model.named_parameters()), torch.randn(4, 8))
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def test_equal_layers_are_cut_at_what_they_hand_on():
    calls = calls_of(Layers([16] * 5))
    found = [calls[a:b] for a, b in zip(repetition_cuts(calls), repetition_cuts(calls)[1:])]
    assert len(found) >= 4 and len({tuple(str(node.target) for node in part) for part in found}) == 1
    for part in found:
        read_after = [node for node in part if any(user not in part for user in node.users)]
        assert [node.target for node in read_after] == [torch.ops.aten.add.Tensor]


def test_layers_of_other_sizes_are_not_equal():
    assert repetition_cuts(calls_of(Layers([16, 24, 32, 40]))) == []


def test_two_kinds_of_layers_are_both_found():
    calls = calls_of(Layers([16] * 4 + [24] * 4))
    sizes = [b - a for a, b in zip(repetition_cuts(calls), repetition_cuts(calls)[1:])]
    assert max(map(sizes.count, sizes)) >= 6
