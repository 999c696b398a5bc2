"""Every operator of a training step that does more than touch its elements is counted by a formula."""
from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from passes.analyses.flops import has_formula, node_flops
from passes.analyses.shapes import Shapes
from passes.op_rules.call_rules import call_of, rule_of
from passes.op_rules.rule_table import name_of, operator_of
from tests.passes.op_rules.families.steps import traced
from tests.passes.op_rules.families.zoo import MODELS

aten = torch.ops.aten
LOOK_UPS = ("embedding", "index", "scatter", "gather", "fft")
"""Heavy in that they move much; of these only the transform computes, n log n, which one per element stands for."""


def contracts(node: fx.Node) -> bool:
    """By its rule, which knows nothing of FLOPs: sums over a letter that two operands of floats share."""
    rule = rule_of(node)
    if rule is None:
        return False
    floats = [set().union(*letters) for letters, spec in zip(rule.inputs, call_of(node).operands, strict=True)
              if "float" in spec.dtype and letters]
    kept = {letter for result in rule.outputs for dim in result for letter in dim}
    return any(letter not in kept and sum(letter in each for each in floats) > 1 for letter in rule.summed)


def heavy_calls(name: str) -> Iterator[fx.Node]:
    for step in traced(name):
        for node in step.gm.graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            if (operator_of(node.target).heavy or contracts(node)) and not any(w in name_of(node.target) for w in LOOK_UPS):
                yield node


@pytest.mark.parametrize("name", list(MODELS))
def test_no_heavy_operator_is_without_a_formula(name):
    assert {name_of(node.target) for node in heavy_calls(name) if not has_formula(node.target)} == set()


def test_contractions_are_found_without_being_named():
    found = {name_of(node.target) for name in ("gpt2", "convnet", "mixtral") for node in heavy_calls(name)
             if contracts(node)}
    assert {"aten::mm", "aten::convolution"} <= found


def test_formulas_work_on_the_calls_of_a_transformer(caplog):
    for step in traced("gpt2"):
        Shapes()(step.gm)
    for node in heavy_calls("gpt2"):
        results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        assert node_flops(node) > sum(r.numel() for r in results if isinstance(r, torch.Tensor))
    assert "formula failed" not in caplog.text


@pytest.mark.parametrize("target", [
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward,
    aten._flash_attention_forward, aten._flash_attention_backward,
    aten._efficient_attention_forward, aten._efficient_attention_backward,
    aten._grouped_mm, aten._scaled_grouped_mm, aten._scaled_mm, aten._int_mm,
    aten.convolution, aten._convolution, aten.convolution_backward, aten.cudnn_convolution,
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.linear, aten.matmul, aten.addmv, aten.mv,
    aten._addmm_activation, aten.dot,
], ids=str)
def test_operators_of_cpus_and_gpus_have_a_formula(target):
    """Also those that tests on a CPU never meet. (Others, such as einsum, bilinear, are taken apart when traced.)"""
    assert has_formula(getattr(target, target.overloads()[0]))
