"""Shapes, dtypes and bytes, read from tracing metadata."""
from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from passes.analyses.shapes import SHAPES, Shapes, TensorSpec
from passes.annotations import has, read
from passes.base import PassError
from tests.passes.traced import joint_graph


def _by_target(graph_module: fx.GraphModule, target: object) -> list[tuple[TensorSpec, ...]]:
    return [read(SHAPES, node) for node in graph_module.graph.nodes if node.target == target]


def test_every_value_of_a_joint_graph_has_its_specs():
    graph_module, _ = joint_graph(nn.Linear(4, 3, dtype=torch.bfloat16), (torch.randn(2, 4, dtype=torch.bfloat16),))
    Shapes()(graph_module)
    assert _by_target(graph_module, torch.ops.aten.addmm.default) == [(TensorSpec((2, 3), torch.bfloat16, 12),)]
    weight = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
    assert read(SHAPES, weight) == (TensorSpec((3, 4), torch.bfloat16, 24),)
    output = graph_module.graph.output_node()
    assert not has(SHAPES, output)


def test_several_results_are_flattened_and_none_is_left_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1, bias=False)

        def forward(self, x):
            return torch.var_mean(self.conv(x), dim=(1, 2, 3))

    graph_module, _ = joint_graph(Model(), (torch.randn(5, 2, 4, 4),))
    Shapes()(graph_module)
    row = TensorSpec((5,), torch.float32, 20)
    assert _by_target(graph_module, torch.ops.aten.var_mean.correction) == [(row, row)]
    # (None, gradient of the weight, None)
    weight = TensorSpec((3, 2, 1, 1), torch.float32, 24)
    assert _by_target(graph_module, torch.ops.aten.convolution_backward.default) == [(weight,)]


def test_symbolic_sizes_become_their_traced_number_and_keep_their_name():
    graph_module, _ = joint_graph(nn.Linear(8, 4), (torch.randn(6, 8),), dynamic=True)
    guards_before = _guard_count(graph_module)
    Shapes()(graph_module)
    (spec,) = _by_target(graph_module, torch.ops.aten.addmm.default)[0]
    assert (spec.shape, spec.bytes, spec.elements) == ((6, 4), 96, 24)
    assert spec.symbolic[1] == "4" and spec.symbolic[0] != "6"
    assert _guard_count(graph_module) == guards_before


def _guard_count(graph_module: fx.GraphModule) -> int:
    sizes = (node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder")
    symbol = next(size for size in sizes if isinstance(size, torch.SymInt))
    return len(symbol.node.shape_env.guards)


def test_sizes_that_depend_on_data_get_the_number_in_the_options():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 4)

        def forward(self, x):
            return self.linear(torch.nonzero(x).float())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph_module, _ = joint_graph(Model(), (torch.ones(100),))
    Shapes(unbacked_size=50)(graph_module)
    (spec,) = _by_target(graph_module, torch.ops.aten.addmm.default)[0]
    assert spec.shape == (50, 4)
    assert spec.bytes == 800


def test_constants_and_asserts_need_no_value_from_tracing():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(3, dtype=torch.int64))

        def forward(self, x):
            torch.ops.aten._assert_async.msg(x, "no")
            return self.table

    graph_module = fx.symbolic_trace(Model())
    x = next(iter(graph_module.graph.nodes))
    x.meta["val"] = torch.ones((), dtype=torch.bool)
    Shapes()(graph_module)
    assert [read(SHAPES, node) for node in graph_module.graph.nodes if node.op != "output"] == [
        (TensorSpec((), torch.bool, 1),), (), (TensorSpec((3,), torch.int64, 24),)]


def test_a_graph_without_values_says_what_to_do():
    graph_module = fx.symbolic_trace(lambda x: torch.neg(x))
    with pytest.raises(PassError, match=r"(?s)no meta\['val'\].*placeholder.*FakeTensorProp"):
        Shapes()(graph_module)
