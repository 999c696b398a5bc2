"""A joint graph with convolutions -> copies of their inputs."""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from passes import compat
from passes.transforms.cleanup.channels_last import ChannelsLast
from tests.passes.traced import joint_graph, mlp

aten = torch.ops.aten


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x / 2))).square().sum()


def copies(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.find_nodes(op="call_function", target=aten.clone.default)
            if node.kwargs.get("memory_format") is torch.channels_last]


def shared(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in copies(gm) if len(node.users) > 1]


@pytest.fixture
def last(monkeypatch) -> None:
    monkeypatch.setattr(compat, "computes_channels_last", lambda gm: True)


def test_what_is_given_is_copied_once_for_forward_and_backward(last):
    gm, _ = joint_graph(Two(), (torch.ones(2, 3, 8, 8),))
    assert ChannelsLast()(gm).modified
    gm.graph.lint()
    weight, rows = sorted(shared(gm), key=lambda node: node.args[0].op, reverse=True)
    assert weight.args[0].op == "placeholder" and rows.args[0].target is aten.div.Tensor
    for copy in (weight, rows):
        assert copy.meta["val"].is_contiguous(memory_format=torch.channels_last)
        assert {user.target for user in copy.users} == {aten.convolution.default, aten.convolution_backward.default}
    (first,) = (node for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
                if weight in node.args)
    assert all(copy < first for copy in (weight, rows)), "just before it is read"


@pytest.mark.parametrize(("loss", "copied"), [
    (lambda x: x.square().mean(), True), (lambda x: torch.tanh(x).sum(), True),
    (lambda x: nn.functional.max_pool2d(x, 2).sum(), False)])
def test_a_gradient_that_begins_with_one_number_is_put_in_order(last, loss, copied):
    """Pointwise calls give their result the order of the first operand; of others nobody knows."""
    class Lossy(Two):
        def forward(self, x):
            return loss(self.second(torch.relu(self.first(x))))

    gm, _ = joint_graph(Lossy(), (torch.ones(2, 3, 8, 8),))
    ChannelsLast()(gm)
    second = next(iter(gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)))
    assert (second.args[0] in copies(gm)) == copied


def test_where_inductor_keeps_the_order_of_dims_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(compat, "computes_channels_last", lambda gm: False)
    gm, _ = joint_graph(Two(), (torch.ones(2, 3, 8, 8),))
    assert not ChannelsLast()(gm).modified and not copies(gm)


def test_a_graph_without_convolutions_is_not_asked_about():
    gm, _ = joint_graph(mlp(4, 8, 1), (torch.ones(2, 4),))
    assert not compat.computes_channels_last(gm)


def test_what_is_joined_for_a_convolution_is_put_in_order_part_by_part(last):
    class Joined(Two):
        def forward(self, x):
            x = torch.relu(self.first(x))
            return self.second(torch.cat([x.flip(2), x.mean(1, keepdim=True)], 1)[:, :8]).square().sum() + x.sum()

    class Read(Joined):
        def forward(self, x):
            x = torch.relu(self.first(x))
            return self.second(torch.cat([x[:, :4].flip(2), x[:, 4:]], 1)).square().sum()

    for model, parts in (Joined(), 0), (Read(), 2):  # the first's goes through a view: nobody knows for whom it is joined
        gm, _ = joint_graph(model, (torch.ones(2, 3, 8, 8),))
        ChannelsLast()(gm)
        (cat,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
        assert sum(x in copies(gm) for x in cat.args[0]) == parts
