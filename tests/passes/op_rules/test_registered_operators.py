"""Properties that users register besides rules: size arguments, local calls, views; and registrations that are refused."""
from __future__ import annotations

import pytest
import torch

from passes.op_rules.base import make_rule
from passes.op_rules.rule_table import OPERATORS, external_operators, load, operator_of, rule
from tests.passes.op_rules.families.harness import check, f, sample

aten, ops = torch.ops.aten, torch.ops.test_registered_operators
LIBRARY = torch.library.Library("test_registered_operators", "FRAGMENT")
LIBRARY.define("filled(Tensor x, int[] shape) -> Tensor")
LIBRARY.impl("filled", lambda x, shape: x.new_ones(shape) * x, "CompositeExplicitAutograd")
LIBRARY.define("halves(Tensor x, int at) -> Tensor")
LIBRARY.impl("halves", lambda x, at: x.reshape(at, -1).t().contiguous(), "CompositeExplicitAutograd")
LIBRARY.define("flat(Tensor x) -> Tensor")


@pytest.fixture(autouse=True)
def registered():
    load()
    with OPERATORS.temporary():
        yield


def same_dims(call):
    return make_rule(call, ["rf"], ["rf"])


def test_a_size_argument_is_made_local():
    case = sample(ops.filled.default, f(4, 6), [4, 6], expect="S(0) -> S(0); S(1) -> S(1)")
    rule("test_registered_operators::filled")(same_dims)
    with pytest.raises(Exception):  # noqa: B017  # whole sizes, local operands: whatever the operator raises
        check(case)
    rule("test_registered_operators::filled", sizes=1)
    assert check(case) > 0


def test_a_local_call_is_made_by_the_function_that_is_registered():
    case = sample(ops.halves.default, f(24), 12, expect="S(0) -> S(1)")
    rule(ops.halves.default, local=lambda call, insert: insert(call.target, call.args[0], call.local_shapes[0][1]))(
        lambda call: make_rule(call, [[["a", "b"]]], [["b", "a"]], sizes={"a": 12, "b": 2}, blocked=["b"]))
    assert check(case) > 0


def test_kinds_and_defaults():
    rule("test_registered_operators::flat", view="part")
    rule(ops.filled.default, heavy=True, fusion="inlined")
    assert (operator_of(ops.flat.default).kind, operator_of("test_registered_operators.flat.default").view) == ("view", "part")
    assert operator_of("test_registered_operators.filled.default").kind == "embedding"
    exp, sin = operator_of(aten.exp.default), operator_of(aten.sin.default)
    assert (exp.fusion, sin.fusion) == ("costly", "inlined") and exp.rule is sin.rule is not None
    assert operator_of(ops.halves.default).kind == "pointwise" and operator_of(ops.halves.default).fusion is None
    assert set(external_operators()) == {"test_registered_operators::flat", "test_registered_operators::filled"}


def test_the_same_is_not_registered_twice():
    rule(aten.mm.default, recomputable=False)
    assert operator_of(aten.mm.default).heavy == "matmul" and "aten::mm" in external_operators()
    with pytest.raises(ValueError, match="heavy of aten::mm is registered twice"):
        rule("test_registered_operators::flat", aten.mm.default, heavy=True)
    assert "test_registered_operators::flat" not in external_operators()
