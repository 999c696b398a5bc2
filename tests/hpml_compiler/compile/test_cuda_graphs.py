"""Joint graphs as they are on a GPU, without one: fake CUDA tensors -> plan and rewrite keep every value on the device.

Autograd wants a device to trace on, so graphs are traced on the CPU and every value is moved, as if they had been.
"""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import plan_graph
from passes import compat
from passes.hardware.cluster import Cluster
from passes.presets import after_planning, annotate
from passes.tracing.joint_trace import JointTrace
from passes.transforms.shard.redistributor import MeshGroups
from tests.helpers.axes import axes_of
from tests.passes.traced import fake, trace_joint


class Mixed(nn.Module):
    """Lookups, a mask and positions made in forward, attention, BatchNorm, dropout, a scatter."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.tokens = nn.Embedding(32, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 32)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.shift + torch.arange(ids.shape[1], device=ids.device)[:, None] / 8
        q, k, v = self.mix(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        x = x + ((q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = nn.functional.dropout(x + self.norm(x.mT).mT, 0.1)
        logits = self.out(x.index_add(1, torch.tensor([0], device=ids.device), x[:, :1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def on_cuda(joint: JointTrace, index: int) -> JointTrace:
    """Every fake value of a joint graph, and every device that is named in it, on a GPU."""
    device, mode = torch.device("cuda", index), compat.fake_mode_of(joint.gm)
    of_cpu = lambda x: device if isinstance(x, torch.device) else x  # noqa: E731
    for node in joint.gm.graph.nodes:
        node.args = compat.pytree.tree_map(of_cpu, node.args, is_leaf=lambda x: isinstance(x, fx.Node))
        node.kwargs = compat.pytree.tree_map(of_cpu, node.kwargs, is_leaf=lambda x: isinstance(x, fx.Node))
        with mode:
            node.meta["val"] = compat.pytree.tree_map_only(
                torch.Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device),
                node.meta.get("val"))
    return joint


def rewritten(index: int, **options: object) -> tuple[str, fx.GraphModule]:
    """The hash of the graph, and the graph of rank `index` of two after the rewrite."""
    with fake():
        joint = on_cuda(trace_joint(Mixed(), torch.zeros(4, 8, dtype=torch.long)), index)
    annotated = annotate(joint.gm, joint.inputs, joint.forward_outputs)
    digest = annotated.hash()
    planned = plan_graph(annotated, Options.parse(options), Cluster.parse("1x2:h100-80g"))
    after_planning(planned.decision, MeshGroups(axes_of(2), (index,), ("axis0",)), "eager")(joint.gm)
    return digest, joint.gm


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_whatever_the_rewrite_adds_is_on_the_device_of_the_rank(axis, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__invert__", torch.Tensor.bitwise_not)  # the operator asks for a real device
    hashes = set()
    for index in (0, 1):
        digest, gm = rewritten(index, mesh={axis: 2})
        hashes.add(digest)
        values = [(node, x) for node in gm.graph.nodes for x in compat.pytree.tree_leaves(node.meta.get("val"))
                  if isinstance(x, torch.Tensor)]
        assert len(values) > 100 and any("_c10d" in str(node.target) for node, _ in values)
        assert {str(x.device) for _, x in values} == {f"cuda:{index}"}, [node.format_node() for node, x in values
                                                                       if x.device.index != index]
        named = [x for node in gm.graph.nodes for x in compat.pytree.tree_leaves((node.args, node.kwargs))
                 if isinstance(x, torch.device)]
        assert {str(device) for device in named} == {f"cuda:{index}"}
    assert len(hashes) == 1, "ranks compare their graphs: each has a device of its own in it"
