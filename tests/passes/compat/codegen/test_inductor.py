"""Graphs compiled or partitioned with less waiting -> the same results."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch.fx.experimental.proxy_tensor import make_fx

from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.tracing.joint_trace import trace
from tests.passes.traced import transformer

X = torch.linspace(-2, 2, 96).view(8, 12)


def compiled(function):
    gm = make_fx(function, tracing_mode="fake")(X)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return compat.compile_with_inductor(gm, values, static_inputs=(), is_backward=False, is_inference=True)


@pytest.mark.timeout(200)
def test_the_end_of_the_context_waits_for_the_kernels_of_all_graphs(monkeypatch):
    waits, wait = [], AsyncCompile.wait
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waits.append(scope) or wait(self, scope))
    functions = [lambda x: (x.sin() * 1.25 + x, ), lambda x: (x.cos().sum(0) - 0.75, )]
    with compat.deferred_cpp_kernels():
        calls = [compiled(functions[0])]
        with compat.deferred_cpp_kernels():
            calls.append(compiled(functions[1]))
        assert not waits
    assert len(waits) == 2
    for function, call in zip(functions, calls, strict=True):
        torch.testing.assert_close(call([X])[0], function(X)[0])


@pytest.mark.timeout(200)
def test_a_kernel_that_cannot_be_compiled_is_an_error_at_the_end(monkeypatch, tmp_path):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # where nobody has compiled it
    compiled(lambda x: (x * 0.125, ))  # what is there for all kernels
    with pytest.raises(Exception, match="no-such-flag"), compat.deferred_cpp_kernels(), config.patch(
            {"cpp.enable_unsafe_math_opt_flag": False}):
        monkeypatch.setattr("torch._inductor.cpp_builder._get_optimization_cflags",
                            lambda *args, **kwargs: (["O0", "-no-such-flag"], []))
        compiled(lambda x: (x.tan() * 0.375, ))
    assert AsyncCompile.wait.__qualname__ == "AsyncCompile.wait"


@pytest.mark.parametrize("deduplicate", [True, False])
def test_what_is_saved_is_known_without_the_halves(deduplicate):
    joint, outputs = traced_transformer()
    forward, _ = compat.min_cut_partition(copy_graph(joint), (), outputs, (), deduplicate=deduplicate)
    expected = {node.name for node in returned_nodes(forward)[outputs:] if node is not None}
    found = {node.name for node in compat.chosen_by_min_cut(copy_graph(joint), outputs, deduplicate=deduplicate)}
    assert found == expected and len(found) > 10


def traced_transformer():
    model, batch = transformer(64, 32, 4, layers=3, rows=2, length=16)
    (traced,) = trace(model, batch)
    return traced.gm, traced.forward_outputs


def test_a_graph_module_becomes_code_when_it_is_called():
    gm = compat.graph_module(nn.Module(), make_fx(lambda x: x.sin() + 1)(X).graph)
    assert gm._needs_recompile()
    torch.testing.assert_close(gm(X), X.sin() + 1)
    assert not gm._needs_recompile()


def test_backward_returns_values_of_forward():
    """A pipeline stage sends back what backward of the stage before reads, which may need no gradient."""
    def stage(primals_1, tangents_1):
        normed = primals_1.sin()
        return normed * 2, tangents_1 * normed, normed.cos()

    tangents = X.cos()
    joint = make_fx(stage, tracing_mode="fake")(X, tangents)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward" if node.name == "mul_1" else "is_forward"
    forward, backward = compat.split_by_tags(joint, 1)
    result, *saved = forward(X)
    torch.testing.assert_close((result, *backward(*saved, tangents)), stage(X, tangents))
