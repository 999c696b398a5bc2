"""A custom autograd Function in a traced model -> calls that forward or backward runs, each in the block of its forward."""
from __future__ import annotations

import pytest
import torch

from passes.graph.fx_nodes import returned_nodes
from passes.graph.module_blocks import assign_blocks, is_backward
from tests.passes.traced import trace_joint
from tests.scripts.functions import WIDTH, Net


@pytest.mark.parametrize(("form", "place"), [
    ("plain", "between"), ("backward_begins_without_gradient", "end"), ("mark_dirty", "ends_blocks"), ("norm", "ends_blocks"),
    ("several_outputs", "in_blocks"), ("in_place_forward", "in_blocks")])
def test_phases_follow_from_tangents_and_blocks_from_the_forward_call(form, place):
    model = Net(form, place)
    joint = trace_joint(model, torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    gm = joint.gm
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert {node.meta["partitioner_tag"] for node in calls} == {"is_forward", "is_backward"}
    late = {node for node in gm.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")}
    for node in calls:
        if late.intersection(node.all_input_nodes):
            late.add(node)
            assert is_backward(node), node
        assert is_backward(node) or not any(map(is_backward, node.all_input_nodes)), node
    blocks = assign_blocks(gm)
    returned = returned_nodes(gm)
    assert not any(is_backward(node) for node in returned[:joint.forward_outputs] if node is not None)
    gradients = dict(zip((given.name for given in joint.inputs), returned[joint.forward_outputs:], strict=True))
    for name, gradient in gradients.items():
        if "blocks." in name and name.endswith("scale"):
            assert blocks[gradient] == name.removesuffix(".scale"), "it is computed where the Function is"
