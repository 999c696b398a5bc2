"""A joint graph that concatenates before -> operands that others read, too, behind a product after."""
from __future__ import annotations

import torch

from passes.transforms.cleanup.unalias_cat import UnaliasCat
from tests.passes.traced import joint_graph

aten = torch.ops.aten


def test_an_operand_that_others_read_too_is_multiplied_by_one():
    def model(x):
        shared = x.exp()
        return torch.cat([shared, x.sin(), x], 1).sum() * shared.sum()

    gm, _ = joint_graph(model, (torch.ones(2, 3, requires_grad=True),))
    assert UnaliasCat()(gm).modified
    gm.graph.lint()
    (cat,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    product, sine, x = cat.args[0]
    assert product.target is aten.mul.Tensor and product.args[0].target is aten.exp.default and product.args[1] == 1
    assert sine.target is aten.sin.default and x.op == "placeholder"
