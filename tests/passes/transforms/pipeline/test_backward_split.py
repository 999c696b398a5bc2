"""A backward graph in two parts -> the same results, with only urgent work in the first."""
from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.graph.fx_nodes import returned_nodes
from passes.transforms.pipeline.backward_split import split_backward

aten = torch.ops.aten


def backward(tangent, x, hidden, first, second):
    """Of second @ relu(first @ x), then of a norm over what comes in: gradients of first, its bias, second, the norm's weight,
    something that is given; and what is sent back."""
    of_hidden = (tangent @ second) * (hidden > 0)
    of_input = of_hidden @ first
    mean, rstd = x.mean(1, keepdim=True), torch.rsqrt(x.var(1, keepdim=True, unbiased=False))
    sent, of_norm, _ = aten.native_layer_norm_backward(of_input, x, [8], mean, rstd, x[0], None, [True, True, False])
    return of_hidden.t() @ x, of_hidden.sum(0), tangent.t() @ hidden, of_norm.view(2, 4), tangent, sent


def graph(returned):
    def chosen(*values):
        found = backward(*values)
        return tuple(None if k is None else found[k] for k in returned)

    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 3), (6, 8), (6, 5), (5, 8), (3, 5))]
    gm = make_fx(chosen, tracing_mode="fake")(*values)
    gm.graph.eliminate_dead_code()
    return gm, {node.name: value for node, value in zip(gm.graph.find_nodes(op="placeholder"), values)}


def run(gm: fx.GraphModule, known):
    """What it returns, in order; known by name afterwards."""
    results = gm(*(known[node.name] for node in gm.graph.find_nodes(op="placeholder")))
    for node, value in zip(returned_nodes(gm), results, strict=True):
        if node is not None:
            known[node.name] = value
    return results


def calls(gm):
    return Counter(node.target for node in gm.graph.nodes if node.op == "call_function")


def test_both_parts_give_what_the_whole_gives():
    gm, known = graph([0, 1, 2, 3, 4, None, 5])
    expected = gm(*known.values())
    first, second = split_backward(gm, 6)
    assert first is not None and second is not None
    early, late = run(first, known), run(second, known)
    for k, value in enumerate(expected[:6]):
        assert (early[k] is None) == (k in (0, 1, 2, 5)) and (value is None or early[k] is None or late[k] is None)
        if value is not None:
            torch.testing.assert_close(late[k] if early[k] is None else early[k], value, rtol=0, atol=0)
    torch.testing.assert_close(early[6], expected[6], rtol=0, atol=0)
    # Of three gradients by matrix products two are left, and one that is handed over: no view of it.
    assert calls(first)[aten.mm.default] == 2 and calls(second)[aten.mm.default] == 2
    handed = returned_nodes(first)[7:]
    assert [node.target for node in handed if node is not None] == [aten.mul.Tensor] and len(late) == 6


def test_what_is_the_same_at_once_is_not_split():
    gm, _ = graph([0, 1, 2])
    assert split_backward(gm, 3) == (None, gm)  # nothing is sent
    gm, _ = graph([3, None, 4, 5])
    assert split_backward(gm, 3) == (gm, None)  # nothing is left


def recomputed(tangent, x, first, second):
    """Gradients of second @ gelu(first @ x), whose inside is computed again: of both weights, and what is sent back."""
    up = x @ first
    half, inner = up * 0.5, torch.erf(up) + 1
    of_up = (tangent @ second) * (inner + half)
    return tangent.t() @ (half * inner).view(6, 8), x.t() @ of_up, of_up @ first.t()


def test_recomputed_values_are_handed_over_where_they_are_smallest():
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 3), (6, 5), (5, 8), (3, 8))]
    gm = make_fx(lambda tangent, *rest: recomputed(tangent, *rest), tracing_mode="fake")(*values)
    gm.graph.find_nodes(op="placeholder")[0].target = "tangents_1"
    known = dict(zip((node.name for node in gm.graph.find_nodes(op="placeholder")), values))
    first, second = split_backward(gm, 2)
    assert first is not None and second is not None
    expected, early = recomputed(*values), run(first, known)
    late = run(second, known)
    for ours, theirs in zip((*late[:2], early[2]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    # The product of both factors and the gradient of `up`, not the factors.
    assert len(returned_nodes(first)) == 5 and calls(second) == {aten.mm.default: 2, aten.t.default: 2, aten.view.default: 1}
