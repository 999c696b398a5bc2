"""A few entries of torch's database of operators; `python -m tests.operators` takes all."""
from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from passes import compat
from passes.tracing.joint_trace import joint_graphs
from tests.operators.calls import trace
from tests.operators.decompositions import COMPILERS, differences
from tests.operators.rule_level import judge
from tests.scripts.launch import outcomes
from tests.scripts.opinfo_outputs import FAMILY

TARGETS = torch.tensor([[3, 0, -1, 2], [1, -1, 2, 0], [-1, 0, 1, 2], [0, 1, 2, 3]])
BYTES = torch.arange(2 * 3 * 8 * 8, dtype=torch.int64).mul(37).remainder(255).to(torch.uint8).view(2, 3, 8, 8)
RESIZES = [dict(mode=mode, antialias=antialias, **size) for mode in ("bilinear", "bicubic") for antialias in (False, True)
           for size in ({"size": (3, 5)}, {"scale_factor": 1.5}, {"size": (11, 4), "align_corners": True})]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", ["nn.functional.multi_margin_loss", "baddbmm", "grid_sampler_2d"])
def test_what_operators_are_taken_apart_into_is_what_they_do(name, compiler):
    assert differences(name, 1, 1, compilers=[compiler]) == []


@pytest.mark.parametrize("name", ["kthvalue", "cdist", "nn.functional.avg_pool2d", "index_put", "linalg.solve", "as_strided"])
def test_every_strategy_of_every_call_gives_what_the_whole_call_gives(name):
    verdict = judge(name, {"first": 2, "others": 1})
    assert verdict.wrong == [] and verdict.runs > 0 and verdict.how == ("replicated" if name == "as_strided" else "split")


def test_an_operator_between_two_layers_is_trained_as_on_one_device(tmp_path):
    cases = [(f"opinfo.{name}", mesh) for name, mesh in (("kthvalue", "dp"), ("linalg.eig", "dp"), ("linalg.solve", "tp"))]
    assert {case: (outcome.verdict, outcome.detail) for case, outcome in outcomes(tmp_path, cases).items()} == {
        case: ("same", "") for case in cases}


def test_an_operator_of_a_sharded_output_gives_what_it_gives_on_one_device(tmp_path):
    cases = [(f"{FAMILY}.{name}", mesh) for name, mesh in (("cumsum", "dp"), ("linalg.inv", "dp"), ("T", "dp"), ("topk", "tp"))]
    assert {case: (outcome.verdict, outcome.detail) for case, outcome in outcomes(tmp_path, cases).items()} == {
        case: ("same", "") for case in cases}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_multilabel_margin_loss_takes_targets_up_to_the_first_minus_one(reduction, compiler):
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    traced = trace(lambda x, t: [F.multilabel_margin_loss(x, t, reduction=reduction)], [x, TARGETS], compiler)
    loss = F.multilabel_margin_loss(x, TARGETS, reduction=reduction)
    tangent = torch.ones_like(loss)
    got = compat.pytree.tree_leaves(fx.Interpreter(traced.gm).run(x.detach(), TARGETS, tangent))
    torch.testing.assert_close(got[:2], [loss.detach(), torch.autograd.grad(loss, x, tangent)[0]])


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("how", RESIZES, ids=str)
def test_images_of_bytes_are_resized_as_eager_torch_does(how, compiler):
    traced = trace(lambda x: [F.interpolate(x, **how)], [BYTES], compiler)
    assert torch.equal(fx.Interpreter(traced.gm).run(BYTES)[0], F.interpolate(BYTES, **how))


def test_the_backend_traces_without_wrong_decompositions_and_leaves_torch_as_it_was():
    op = torch.ops.aten.multilabel_margin_loss_forward.default
    kernels = dict(op.py_kernels)
    for compiler in COMPILERS:
        x = torch.randn(4, 4, requires_grad=True)
        (graph,) = joint_graphs(F.multilabel_margin_loss, (x, TARGETS), compiler=compiler, alone=compiler == "eager")
        assert len(graph.gm.graph.find_nodes(op="call_function", target=op)) == 1
    assert kernels == op.py_kernels


@pytest.mark.parametrize("size", [(3,), (300,), (300, 2), (2, 300)], ids=str)
def test_ones_on_the_diagonal_of_many_rows_are_counted_in_numbers_that_eager_has(size):
    def scaled(x):
        return [torch.eye(*size, dtype=torch.float64) * x + torch.eye(*size)]

    x = torch.tensor(3.0)
    traced = trace(scaled, [x], "eager")
    assert torch.equal(fx.Interpreter(traced.gm).run(x)[0], scaled(x)[0])
