"""A joint graph -> its marks for the partitioner."""
from __future__ import annotations

import torch
from torch import fx

from passes.transforms.cleanup.pre_partition import InductorJoint, TagPhases
from tests.passes.traced import joint_graph


class Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ self.weight, 0.5).square().sum()


def tags(graph_module: fx.GraphModule) -> dict[str, str]:
    return {str(node.target): node.meta["partitioner_tag"] for node in graph_module.graph.nodes if node.op == "call_function"}


def test_what_forward_returns_and_draws_is_forward_and_nothing_else():
    joint, forward_outputs = joint_graph(Dropped(), (torch.randn(3, 4),))
    (output,) = joint.graph.find_nodes(op="output")
    gradient = [x for x in output.args[0][forward_outputs:] if isinstance(x, fx.Node)]
    for node in joint.graph.nodes:  # as after a rewrite that took all for forward
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_forward"
    TagPhases(forward_outputs)(joint)
    found = tags(joint)
    assert found["aten.mm.default"] == "is_backward", "the last of them makes the gradient"
    assert all(found[name] == "is_forward" for name in found if "rand" in name or "sum" in name)
    assert all(node.meta["partitioner_tag"] == "is_backward" for node in gradient)


class Counts(torch.nn.Linear):
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.sums.add_(x.sum(0))
        return super().forward(x).square().sum(), self.sums[1:3]


def test_views_of_what_forward_changes_come_before_backward():
    joint, forward_outputs = joint_graph(Counts(), (torch.randn(3, 4),))
    (view,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    (tangent,) = [node for node in joint.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    made = [*tangent.users]
    assert all(node < view for node in made), "so it is traced"
    TagPhases(forward_outputs)(joint)
    assert all(view < node for node in made) and view.meta["partitioner_tag"] == "is_forward"
    joint.graph.lint()


class TimesOne(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.ones(3, 4)


def test_inductor_takes_out_what_does_nothing():
    joint, _ = joint_graph(TimesOne(4, 4), (torch.randn(3, 4),))
    products = lambda: joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)  # noqa: E731
    assert products()
    assert InductorJoint()(joint).modified and not products()
