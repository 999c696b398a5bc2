"""Every operator of a training step has a rule, whatever the family of the model."""
from __future__ import annotations

import operator

import pytest
from torch import fx

from passes.op_rules.base import strategies
from passes.op_rules.call_rules import call_of, results_of, rule_of
from passes.op_rules.rule_table import has_rule, is_random, name_of
from tests.passes.op_rules.families.steps import traced
from tests.passes.op_rules.families.zoo import MODELS

MAKES_NO_TENSOR = {"aten::_assert_async.msg"}


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


@pytest.mark.parametrize("name", list(MODELS))
def test_every_call_of_a_training_step_has_a_rule(name):
    for step in traced(name):
        unknown = {name_of(n.target) for n in calls(step.gm.graph) if not has_rule(n.target)}
        assert unknown <= MAKES_NO_TENSOR
        assert [n.format_node() for n in calls(step.gm.graph) if results_of(n) and rule_of(n) is None] == []


def test_the_zoo_holds_many_operators():
    found = {name_of(n.target) for name in MODELS for step in traced(name) for n in calls(step.gm.graph)}
    assert len(found) > 130


@pytest.mark.parametrize("name", list(MODELS))
def test_nearly_every_call_can_be_split(name):
    """What has dims and is drawn from no generator: counted with the factors that a tensor has by itself."""
    whole: dict[str, int] = {}
    total = 0
    for step in traced(name):
        for node in calls(step.gm.graph):
            if is_random(node.target) or not any(r.numel() > 64 for r in results_of(node)):
                continue
            total += 1
            call = call_of(node)
            factors = [tuple((s,) if s > 1 else () for s in spec.shape) for spec in (*call.operands, *call.results)]
            count = len(call.operands)
            if not any(s.splits for s in strategies(rule_of(node), factors[:count], factors[count:])):
                whole[name_of(node.target)] = whole.get(name_of(node.target), 0) + 1
    assert total > 20
    assert sum(whole.values()) <= 0.1 * total, whole
