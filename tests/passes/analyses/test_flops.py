"""FLOPs against hand counts, against counting by hand-written loops, and against torch's counter."""
from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from passes.analyses.flops import FLOPS, Flops
from passes.analyses.shapes import Shapes
from passes.annotations import read
from passes.compat import pytree
from passes.manager import PassManager
from passes.op_rules.families.moe import grouped_mm_backward_flops, grouped_mm_flops
from passes.op_rules.rule_table import OPERATORS, rule
from tests.passes.traced import joint_graph

aten = torch.ops.aten


def call_flops(target, *args, val=None, **kwargs) -> float:
    """FLOPs of one call: tensors become inputs; `val` is what it returns, found by running it if not given."""
    graph = fx.Graph()

    def as_input(value: torch.Tensor | torch.SymInt) -> fx.Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, *pytree.tree_map_only((torch.Tensor, torch.SymInt), as_input, (args, kwargs)))
    node.meta["val"] = target(*args, **kwargs) if val is None else val
    graph.output(node)
    graph_module = fx.GraphModule(nn.Module(), graph)
    PassManager([Shapes(), Flops()])(graph_module)
    return read(FLOPS, node)


def op_name(value: object) -> str | None:
    """Test ids: the operator; pytest numbers the rest."""
    return str(value) if callable(value) and not isinstance(value, torch.Tensor) else ""


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.mm.default, (meta(2, 3), meta(3, 5)), 2 * 2 * 3 * 5),
        (aten.addmm.default, (meta(5), meta(2, 3), meta(3, 5)), 2 * 2 * 3 * 5),
        (aten.bmm.default, (meta(7, 2, 3), meta(7, 3, 5)), 7 * 2 * 2 * 3 * 5),
        (aten.baddbmm.default, (meta(7, 2, 5), meta(7, 2, 3), meta(7, 3, 5)), 7 * 2 * 2 * 3 * 5),
        (aten.mv.default, (meta(2, 3), meta(3)), 2 * 2 * 3),
        (aten.dot.default, (torch.ones(3), torch.ones(3)), 2 * 3),
        (aten.linear.default, (meta(4, 2, 3), meta(5, 3)), 2 * 4 * 2 * 3 * 5),
        (aten.matmul.default, (meta(4, 2, 3), meta(3, 5)), 2 * 4 * 2 * 3 * 5),
        # a bilinear layer of 4 rows, 2 x 3 inputs and 5 outputs
        (aten._trilinear.default, (meta(4, 2), meta(5, 2, 3), meta(4, 3), [1, 3], [0], [1, 2], [2, 3]), 3 * 4 * 2 * 3 * 5),
        (aten._cdist_forward.default, (meta(4, 3), meta(5, 3), 2.0, None), 3 * 4 * 5 * 3),
        (aten._cdist_backward.default, (meta(4, 5), meta(4, 3), meta(5, 3), 2.0, meta(4, 5)), 3 * 4 * 5 * 3),
    ],
    ids=op_name,
)
def test_products_of_matrices(target, args, expected):
    assert call_flops(target, *args) == expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolution_forward_and_backward(groups, transposed):
    x, channels_out = meta(2, 4, 9, 9), 8
    weight = meta(4, channels_out // groups, 3, 3) if transposed else meta(channels_out, 4 // groups, 3, 3)
    rest = ([2, 2], [0, 0], [1, 1], transposed, [0, 0], groups)
    out = aten.convolution.default(x, weight, None, *rest)
    # A multiply-add per weight, pixel (of the input if transposed, else the output) and sample.
    once = 2 * 2 * weight.numel() * (x if transposed else out).shape[2:].numel()
    assert call_flops(aten.convolution.default, x, weight, None, *rest) == once
    for mask, times in (((True, True, False), 2), ((False, True, False), 1), ((True, False, False), 1)):
        backward = call_flops(aten.convolution_backward.default, out, x, weight, None, *rest, mask)
        assert backward == times * once


def test_grouped_convolution_backward_is_two_dense_ones_per_group():
    """Before -> after: torch's formula for the whole -> the sum of torch's formula over the groups, one by one."""
    formula = flop_registry[aten.convolution_backward]
    groups, rest = 4, ([1, 1], [0, 0], [1, 1], False, [0, 0])
    x, weight, grad = meta(2, 8, 6, 6), meta(12, 2, 3, 3), meta(2, 12, 4, 4)
    piece = (grad[:, :3], x[:, :2], weight[:3], None, *rest, 1, (True, True, False))
    by_group = groups * formula(*piece, out_val=(piece[1], piece[2], None))
    call = (grad, x, weight, None, *rest, groups, (True, True, False))
    assert call_flops(aten.convolution_backward.default, *call, val=(x, weight, None)) == by_group


B, H, M, N, D, E = 2, 4, 5, 7, 8, 3
Q, K, V, OUT = meta(B, H, M, D), meta(B, H, N, D), meta(B, H, N, E), meta(B, H, M, E)
LSE = meta(B, H, M)
FORWARD = 2 * B * H * M * N * (D + E)
BACKWARD = 2 * B * H * M * N * (3 * D + 2 * E)  # scores again, then gradients of scores, v, q and k


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu.default, ()),
        (aten._scaled_dot_product_flash_attention.default, ()),
        (aten._scaled_dot_product_efficient_attention.default, (None, True)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
        (aten._scaled_dot_product_fused_attention_overrideable.default, ()),
        (aten._scaled_dot_product_attention_math.default, ()),
        (aten.scaled_dot_product_attention.default, ()),
    ],
    ids=op_name,
)
def test_attention_forward(target, rest):
    assert call_flops(target, Q, K, V, *rest, val=(OUT, LSE)) == FORWARD


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (OUT, LSE, 0.0, True)),
        (aten._scaled_dot_product_flash_attention_backward.default, (OUT, LSE, None, None, M, N, 0.0, True, LSE, LSE)),
        (aten._scaled_dot_product_efficient_attention_backward.default, (None, OUT, LSE, LSE, LSE, 0.0, [True] * 4)),
        (aten._scaled_dot_product_cudnn_attention_backward.default, (OUT, LSE, LSE, LSE, None, None, None, M, N, 0.0)),
        (aten._scaled_dot_product_fused_attention_overrideable_backward.default, (None, [True] * 4, OUT, LSE)),
    ],
    ids=op_name,
)
def test_attention_backward(target, rest):
    assert call_flops(target, OUT, Q, K, V, *rest, val=(Q, K, V)) == BACKWARD


def test_attention_with_fewer_key_heads_costs_what_the_queries_ask():
    k, v = meta(B, 2, N, D), meta(B, 2, N, E)
    assert call_flops(aten._scaled_dot_product_flash_attention.default, Q, k, v, val=(OUT, LSE)) == FORWARD


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_agrees_with_torch_where_torch_has_a_formula(kind):
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    assert flop_registry[forward](Q, K, V, out_val=OUT) == FORWARD
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    assert flop_registry[backward](OUT, Q, K, V, out_val=None) == BACKWARD


ROWS, HIDDEN, WIDE, EXPERTS = 12, 3, 5, 4
OFFSETS = torch.tensor([3, 3, 10, 12], dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "out", "expected"),
    [  # every row meets one expert; the gradient of the weights sums over each expert's rows
        (meta(ROWS, HIDDEN), meta(EXPERTS, HIDDEN, WIDE), meta(ROWS, WIDE), 2 * ROWS * HIDDEN * WIDE),
        (meta(HIDDEN, ROWS), meta(ROWS, WIDE), meta(EXPERTS, HIDDEN, WIDE), 2 * ROWS * HIDDEN * WIDE),
        (meta(EXPERTS, WIDE, HIDDEN), meta(HIDDEN, ROWS), meta(WIDE, ROWS), 2 * ROWS * HIDDEN * WIDE),
        (meta(EXPERTS, 2, HIDDEN), meta(EXPERTS, HIDDEN, WIDE), meta(EXPERTS, 2, WIDE), 4 * EXPERTS * HIDDEN * WIDE),
    ],
)
def test_grouped_matmul(left, right, out, expected):
    assert call_flops(aten._grouped_mm.default, left, right, OFFSETS, val=out) == expected


def test_an_op_of_another_library_costs_what_it_registers():
    library = torch.library.Library("hpml_test_grouped", "FRAGMENT")
    library.define("experts(Tensor x, Tensor w, Tensor offs) -> Tensor")
    library.define("experts_backward(Tensor x, Tensor w, Tensor offs, Tensor grad) -> (Tensor, Tensor)")
    for name in ("gelu", "reserve", "rows"):
        library.define(f"{name}(Tensor x) -> Tensor")
    ops = torch.ops.hpml_test_grouped
    x, w, out = meta(ROWS, HIDDEN), meta(EXPERTS, HIDDEN, WIDE), meta(ROWS, WIDE)
    once = 2 * ROWS * HIDDEN * WIDE
    with OPERATORS.temporary():
        rule("hpml_test_grouped::experts", heavy="matmul", flops=grouped_mm_flops)
        rule(ops.experts_backward.default, flops=grouped_mm_backward_flops)
        rule("hpml_test_grouped::gelu", flops=8)
        rule("hpml_test_grouped::reserve", flops=0)
        rule("hpml_test_grouped::rows", view="part")
        assert call_flops(ops.experts.default, x, w, OFFSETS, val=out) == once
        assert call_flops(ops.experts_backward.default, x, w, OFFSETS, out, val=(x, w)) == 2 * once
        assert call_flops(ops.gelu.default, x, val=x) == 8 * ROWS * HIDDEN
        assert call_flops(ops.reserve.default, x, val=x) == call_flops(ops.rows.default, x, val=x) == 0
    assert call_flops(ops.experts.default, x, w, OFFSETS, val=out) == ROWS * WIDE


def test_an_op_that_nobody_knows_costs_its_output():
    library = torch.library.Library("hpml_test_mystery", "FRAGMENT")
    library.define("mystery(Tensor x) -> (Tensor, Tensor)")
    target = torch.ops.hpml_test_mystery.mystery.default
    assert call_flops(target, meta(10, 10), val=(meta(3, 4), meta(5))) == 17


def test_a_formula_that_fails_costs_the_output_and_is_logged(caplog):
    assert call_flops(aten.mm.default, meta(2, 3), meta(4, 5), val=meta(2, 5)) == 10
    assert "formula failed" in caplog.text and "aten.mm.default" in caplog.text


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.add.Tensor, (meta(4, 1), meta(5)), 20),
        (aten.sum.dim_IntList, (meta(4, 5), [1]), 20),
        (aten.var_mean.correction, (meta(4, 5), [0]), 20),
        (aten.amax.default, (meta(4, 5), [0]), 20),
        (aten.view.default, (meta(4, 5), [20]), 0),
        (aten.permute.default, (meta(4, 5), [1, 0]), 0),
        (aten._unsafe_view.default, (meta(4, 5), [20]), 0),
        (aten.split.Tensor, (meta(4, 5), 2), 0),
        (aten.empty.memory_format, ([4, 5],), 0),
        (aten.embedding.default, (meta(9, 3), meta(5, dtype=torch.int64)), 15),
        (operator.getitem, ((meta(4), meta(5)), 1), 0),
        (operator.mul, (2, 3), 0),
    ],
    ids=op_name,
)
def test_everything_else_costs_one_per_element(target, args, expected):
    assert call_flops(target, *args) == expected


def test_collectives_are_priced_elsewhere():
    target = torch.ops._c10d_functional.all_reduce.default
    assert call_flops(target, meta(4, 5), "sum", "0", val=meta(4, 5)) == 0


def test_a_joint_graph_has_the_products_that_torch_counts_in_a_training_step():
    features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(features, nn.Linear(6 * 36, 10), nn.Tanh(), nn.Linear(10, 4))
    x = torch.randn(5, 3, 8, 8)
    graph_module, _ = joint_graph(model, (x,))
    PassManager([Shapes(), Flops()])(graph_module)
    ours = sum(
        read(FLOPS, node)
        for node in graph_module.graph.nodes
        if getattr(node.target, "overloadpacket", None) in flop_registry
    )
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert ours == counter.get_total_flops()


def test_symbolic_sizes_count_at_their_traced_number():
    graph_module, _ = joint_graph(nn.Linear(8, 4), (torch.randn(6, 8),), dynamic=True)
    PassManager([Shapes(), Flops()])(graph_module)
    counts = [read(FLOPS, n) for n in graph_module.graph.nodes if n.target in (aten.addmm.default, aten.mm.default)]
    assert counts == [2 * 6 * 8 * 4] * 2


def test_a_formula_that_takes_a_symbolic_size_adds_no_guard():
    graph_module, _ = joint_graph(nn.Linear(8, 4), (torch.randn(6, 8),), dynamic=True)
    size = next(n.meta["val"] for n in graph_module.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt))
    guards_before = len(size.node.shape_env.guards)
    q = meta(10, H, D)  # two sequences in one: at most `size` rows each
    offsets = meta(3, dtype=torch.int32)
    rest = (offsets, offsets, size, size, 0.0, False, False)
    assert call_flops(aten._flash_attention_forward.default, q, q, q, *rest, val=q) == 2 * 2 * H * 6 * 6 * (D + D)
    assert len(size.node.shape_env.guards) == guards_before
