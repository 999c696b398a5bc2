"""A graph of aten calls -> bytes -> the same graph: calls, names, values, and who shares memory with whom."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.serialization.serialized_graph import CannotSerialize, bare, pack, unpack

c10d = torch.ops._c10d_functional


class Attention(nn.Module):
    """Views, a tuple of results, dtypes, slices and constants."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in self.qkv(x).split(8, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 4, 8)
        return out.to(torch.bfloat16), out[:, 1:], x.view(8, 8), torch.tensor([1.5, 2.5]) * out.sum(), out.amax(-1).max(dim=0)


def flat(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [*(p.detach() for p in model.parameters()), x]


def traced(model: nn.Module, x: torch.Tensor) -> torch.fx.GraphModule:
    names = [name for name, _ in model.named_parameters()]

    def call(*given):
        return torch.utils._pytree.tree_leaves(torch.func.functional_call(model, dict(zip(names, given)), given[len(names):]))
    return make_fx(call, tracing_mode="fake")(*flat(model, x))


def back(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return unpack(pack(gm), FakeTensorMode())


def vals(gm: torch.fx.GraphModule) -> list:
    def seen(value):
        if isinstance(value, tuple | list):
            return type(value), [seen(x) for x in value]
        return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device,
                value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else value
    return [(node.op, node.name, seen(node.meta.get("val"))) for node in gm.graph.nodes]


def test_calls_names_and_values_come_back():
    model, x = Attention(), torch.randn(2, 4, 8)
    gm = traced(model, x)
    again = back(gm)
    assert again.code == gm.code and vals(again) == vals(gm)
    given = flat(model, x)
    for before, after in zip(gm(*given), again(*given), strict=True):
        assert torch.equal(before, after)


def test_what_shared_memory_shares_it_again_and_nothing_else_does():
    gm = traced(Attention(), torch.randn(2, 4, 8))
    again = back(gm)

    def shared(graph):
        nodes = [node for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        return {(a.name, b.name) for a in nodes for b in nodes if memory_of(a) == memory_of(b)}
    assert shared(again) == shared(gm) and len(shared(gm)) > len(gm.graph.nodes)


def test_inputs_keep_whether_they_need_gradients():
    gm = traced(Attention(), torch.randn(2, 4, 8))
    node = gm.graph.find_nodes(op="placeholder")[0]
    node.meta["val"].requires_grad_()
    assert [n.meta["val"].requires_grad for n in back(gm).graph.find_nodes(op="placeholder")][:2] == [True, False]


def of_own_code(x):
    return x + 1


@pytest.mark.parametrize(("make", "why"), [
    (lambda graph, x: graph.call_function(of_own_code, (x,)), "a call of"),
    (lambda graph, x: graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_functional, (x,)), "a call of triton"),
    (lambda graph, x: graph.get_attr("inner"), "the constant inner"),
    (lambda graph, x: graph.get_attr("large"), "which is large"),
])
def test_what_may_mean_something_else_in_another_process_is_refused(make, why):
    graph = torch.fx.Graph()
    root = nn.Module()
    root.inner = torch.fx.GraphModule({}, torch.fx.Graph())
    root.register_buffer("large", torch.zeros(2**19))
    graph.output(make(graph, graph.placeholder("x")))
    with pytest.raises(CannotSerialize, match=why):
        pack(torch.fx.GraphModule(root, graph))


def test_sizes_that_are_not_numbers_are_refused():
    gm = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.randn(3, 4))
    with pytest.raises(CannotSerialize, match="not numbers"):
        pack(gm)


def test_bare_modules_of_equal_graphs_have_the_same_in_the_same_order():
    model, x = Attention(), torch.randn(2, 4, 8)
    one, other = traced(model, x), back(traced(model, x))
    one.meta["from"] = "a trace"
    assert list(vars(bare(one))) == list(vars(bare(other))) and bare(one).meta == bare(other).meta == {}
    assert bare(one).code == one.code and [n.meta for n in bare(one).graph.nodes] == [n.meta for n in one.graph.nodes]


def test_several_graphs_and_what_is_said_of_them_share_memory_as_before():
    """Lists, names, numbers and fakes around two graphs, of which one reads what the other makes."""
    gm = traced(Attention(), torch.randn(2, 4, 8))
    one, other = bare(gm), bare(gm)
    read = returned_nodes(one)[2]
    assert read is not None
    what = {"graphs": (one, other), "saved": [read.meta["val"], None, 3], "twice": [one]}
    again = unpack(pack(what), FakeTensorMode())
    assert again["saved"][1:] == [None, 3] and again["twice"][0] is again["graphs"][0]
    made, theirs = (returned_nodes(each)[2] for each in again["graphs"])
    assert made is not None and theirs is not None
    assert memory_of(made) == memory_of(theirs) == memory_of(again["saved"][0])
    assert memory_of(made) != memory_of(returned_nodes(again["graphs"][0])[0])


@pytest.mark.parametrize("what", [lambda: None, nn.Parameter(torch.zeros(2))], ids=["a function", "a parameter"])
def test_what_another_process_does_not_have_cannot_be_packed(what):
    with pytest.raises(CannotSerialize):
        pack({"what": what})
