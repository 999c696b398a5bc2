"""Graphs before -> graphs with other operators and the same values after."""
from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from passes.compat import fake_mode_of
from passes.op_rules.rule_table import operator_of
from passes.transforms.cleanup.normalization import Normalize, normalize

aten = torch.ops.aten


def traced(function, *args):
    return make_fx(function, tracing_mode="fake")(*args)


def targets(gm) -> list:
    return [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def check(function, *args, gone=(), tolerance=1e-12):
    """Normalize the graph of `function`; compare values and, node by node, what the graph says of them."""
    gm = traced(function, *args)
    before = gm(*args)
    assert not gone or set(gone) & set(targets(gm)), "nothing to rewrite"
    assert normalize(gm, fake_mode_of(gm))
    after = gm(*args)
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance, check_stride=False)
    assert not set(gone) & set(targets(gm))
    interpreter = Checked(gm)
    interpreter.run(*args)
    return gm


class Checked(torch.fx.Interpreter):
    """Runs a graph and compares each value with the fake one that the node carries."""

    def run_node(self, n):
        value = super().run_node(n)
        fake = n.meta.get("val")
        if n.op != "output" and isinstance(value, torch.Tensor):
            assert isinstance(fake, torch.Tensor), n
            assert (fake.shape, fake.dtype, fake.stride()) == (value.shape, value.dtype, value.stride()), n
        return value


def f(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("scales", [{}, {"alpha": 2.0}, {"beta": 3.0}, {"beta": 0.5, "alpha": -1.0}, {"beta": 0}])
@pytest.mark.parametrize("bias", [(5,), (4, 5), (1, 5), (4, 1)])
def test_a_fused_bias_is_taken_apart(bias, scales):
    gm = check(lambda b, x, y: torch.addmm(b, x, y, **scales), f(*bias), f(4, 3), f(3, 5), gone=[aten.addmm.default])
    assert targets(gm)[0] == aten.mm.default
    assert (aten.add.Tensor in targets(gm)) == (scales.get("beta") != 0)


def test_a_batched_fused_bias_is_taken_apart():
    check(lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5), f(2, 4, 5), f(2, 4, 3), f(2, 3, 5),
          gone=[aten.baddbmm.default])


@pytest.mark.parametrize("function", [
    lambda x: x.mean(), lambda x: x.mean(0), lambda x: x.mean((0, 2)), lambda x: x.mean(-1, keepdim=True),
    lambda x: aten.mean.dim(x, [], True),
])
def test_means_become_sums(function):
    gm = check(function, f(3, 4, 5), gone=[aten.mean.default, aten.mean.dim])
    assert targets(gm) == [aten.sum.dim_IntList, aten.div.Tensor]


@pytest.mark.parametrize("correction", [0, 1, 2, None])
@pytest.mark.parametrize(("dims", "keep"), [(None, False), ([0], False), ([0, 2], True), ([-1], True), ([0, 1, 2], False)])
def test_moments_become_sums(dims, keep, correction):
    settings = {"keepdim": keep, **({} if correction is None else {"correction": correction})}
    check(lambda x: torch.var_mean(x, dims, **settings), f(3, 4, 5), gone=[aten.var_mean.correction])
    check(lambda x: torch.var(x, dims, **settings), f(3, 4, 5), gone=[aten.var.correction])


def test_moments_are_taken_about_the_mean():
    """Not as a difference of squares, which loses everything when the mean is large."""
    check(lambda x: torch.var_mean(x, [0]), f(1000, 3) + 1e8, gone=[aten.var_mean.correction], tolerance=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(dtype):
    x = torch.rand(4096, 3).to(dtype) + 1
    gm = check(lambda x: x.mean(0), x, gone=[aten.mean.dim], tolerance=1e-2)
    (total,) = [n for n in gm.graph.nodes if n.target == aten.sum.dim_IntList]
    assert total.meta["val"].dtype == torch.float32
    gm = check(lambda x: torch.var_mean(x, [0]), x, gone=[aten.var_mean.correction], tolerance=2e-2)
    assert all(n.meta["val"].dtype == torch.float32 for n in gm.graph.nodes if n.target == aten.sum.dim_IntList)


def test_a_mean_in_another_dtype():
    check(lambda x: x.mean(0, dtype=torch.float64), torch.arange(12).view(3, 4), gone=[aten.mean.dim])
    check(lambda x: x.mean(dtype=torch.float64), f(3, 4, dtype=torch.float32), gone=[aten.mean.default])


@pytest.mark.parametrize("function", [
    lambda x: torch.var(x, [1], correction=1),  # one element each: NaN
    lambda x: x.sum(0), lambda x: torch.relu(x),
])
def test_other_graphs_stay_as_they_are(function):
    gm = traced(function, f(4, 1))
    text = gm.code
    assert not normalize(gm, fake_mode_of(gm))
    assert gm.code == text


def test_identities_go_but_not_where_the_graph_returns_them():
    def function(x):
        inner = aten.alias.default(aten.exp.default(x))
        return aten.neg.default(inner), aten.alias.default(x), aten.detach.default(inner)

    gm = traced(function, f(3))
    assert normalize(gm, fake_mode_of(gm))
    *before, last = targets(gm)
    assert before == [aten.exp.default, aten.neg.default, aten.alias.default]
    assert last in (aten.detach.default, aten.alias.default), "torch 2.15 traces the one as the other"


def test_every_product_has_its_own_views():
    def function(x, w):
        t = aten.permute.default(aten.view.default(w, [6, 4]), [1, 0])
        one, two = aten.mm.default(x, t), aten.mm.default(aten.neg.default(x), t)
        return one, two, aten.exp.default(t)

    gm = check(function, f(5, 4), f(24))  # equal views are shared before
    products = [n for n in gm.graph.nodes if operator_of(n.target).heavy]
    views = [n.args[1] for n in products]
    assert len(products) == 2 and len({*views, *(v.args[0] for v in views)}) == 4
    for view in views:
        assert len(view.users) == 1 == len(view.args[0].users) and view.args[0].args[0].name == "w_1"
    (exp,) = [n for n in gm.graph.nodes if n.target == aten.exp.default]
    assert exp.args[0] not in views
    assert not normalize(gm, fake_mode_of(gm)), "a second time there is nothing to do"


def test_a_view_for_one_product_alone_is_left_alone():
    gm = traced(lambda x, w: aten.mm.default(x, aten.permute.default(w, [1, 0])), f(5, 4), f(6, 4))
    assert not normalize(gm, fake_mode_of(gm))


def test_copies_belong_to_the_product_that_reads_them():
    gm = traced(lambda x, w: (t := aten.permute.default(w, [1, 0]), aten.mm.default(x, t), aten.mm.default(t, w)),
                f(5, 4), f(6, 4))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    for number, (node, tag) in enumerate(zip(nodes, ("is_forward", "is_forward", "is_backward"))):
        node.meta.update(partitioner_tag=tag, seq_nr=number)
    assert normalize(gm, fake_mode_of(gm))
    for node in [n for n in gm.graph.nodes if operator_of(n.target).heavy]:
        (view,) = [a for a in node.args if operator_of(a.target).view == "whole"]
        assert (view.meta["partitioner_tag"], view.meta["seq_nr"]) == (node.meta["partitioner_tag"], node.meta["seq_nr"])


def test_the_pass_does_the_same_and_says_what_it_did():
    gm = traced(lambda b, x, y: torch.addmm(b, x, y), f(5), f(4, 3), f(3, 5))
    inputs = [f(5), f(4, 3), f(3, 5)]
    before = gm(*inputs)
    Normalize()(gm)
    assert aten.addmm.default not in targets(gm)
    torch.testing.assert_close(gm(*inputs), before)


def test_random_numbers_in_the_shape_of_a_value_do_not_wait_for_it():
    x = f(4, 6).t()
    gm = traced(lambda x: torch.rand_like(x.sin()) + torch.bernoulli(x.cos(), 0.3), x)
    torch.manual_seed(0)
    before = gm(x)
    assert normalize(gm, fake_mode_of(gm))
    torch.manual_seed(0)
    torch.testing.assert_close(gm(x), before)
    for node in gm.graph.find_nodes(op="call_function", target=aten.rand_like.default):
        assert node.args[0].target == aten.empty_strided.default
    assert not {aten.sin.default, aten.cos.default} & set(targets(gm))
    drawn_twice = traced(lambda x: torch.bernoulli(torch.rand_like(x) + 1, 0.3), torch.empty(3))
    normalize(drawn_twice, fake_mode_of(drawn_twice))
    assert aten.rand_like.default in targets(drawn_twice), "what is drawn first decides what is drawn next"


@pytest.mark.parametrize("make", [
    lambda x: aten.new_zeros(x, [3, 2]), lambda x: aten.new_ones(x, [3, 2], dtype=torch.int64),
    lambda x: aten.new_full(x, [3], 7), lambda x: aten.zero(aten.new_empty(x, [5])),
    lambda x: aten.zero(aten.new_empty_strided(x, [2, 3], [1, 2]))])
def test_constants_of_the_dtype_of_a_value_do_not_wait_for_it(make):
    x = f(4, 6).double()
    gm = traced(lambda x: make(x.sin()), x)
    before = gm(x)
    assert normalize(gm, fake_mode_of(gm)) and aten.sin.default not in targets(gm)
    torch.testing.assert_close(gm(x), before, rtol=0, atol=0, check_stride=True)
    drawn = traced(lambda x: make(torch.rand_like(x)), x)
    normalize(drawn, fake_mode_of(drawn))
    assert aten.rand_like.default in targets(drawn), "the next random numbers would be others"


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_draws_its_mask_of_anything(p):
    x = f(4, 6)
    gm = traced(lambda x: torch.native_dropout(x, p, True), x)
    torch.manual_seed(0)
    before = gm(x)
    changed = normalize(gm, fake_mode_of(gm))
    assert changed == (p < 1)
    torch.manual_seed(0)
    for a, b in zip(gm(x), before, strict=True):
        torch.testing.assert_close(a, b)
    (drawn,) = gm.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    assert (drawn.args[0].op == "placeholder") == (p == 1)
