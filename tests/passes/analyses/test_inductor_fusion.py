"""A call -> whether inductor fuses it with its inputs, and its temporary memory."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.analyses.inductor_fusion import is_fusing, scratch_bytes
from tests.passes.traced import joint_graph

INDEX_BYTES = 3 * 4 * 8


@pytest.fixture(params=[1, 2])
def threads(request):
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(usual)


class Adding(nn.Module):
    def forward(self, x, index):
        return torch.zeros(3, 4).scatter_add(0, index, x).sin().sum()


class Pooling(nn.Module):
    def forward(self, x):
        return F.max_pool2d(x, 2).sin().sum()


def called(gm, name):
    (found,) = (node for node in gm.graph.nodes if name in str(node.target))
    return found


def test_threads_that_would_add_to_the_same_memory_call_a_kernel(threads):
    gm, _ = joint_graph(Adding(), (torch.ones(3, 4, requires_grad=True), torch.zeros(3, 4, dtype=torch.int64)))
    added = called(gm, "scatter_add")
    assert (is_fusing(added), scratch_bytes(added)) == ((True, 0) if threads == 1 else (False, INDEX_BYTES))


def test_the_gradient_of_a_pooling_that_is_not_taken_apart_adds_nothing_to_the_memory_of_others(threads):
    torch.use_deterministic_algorithms(True)
    try:
        gm, _ = joint_graph(Pooling(), (torch.ones(2, 3, 4, 4, requires_grad=True),))
    finally:
        torch.use_deterministic_algorithms(False)
    pooled = called(gm, "max_pool2d_with_indices_backward")
    assert (is_fusing(pooled), scratch_bytes(pooled)) == (True, 0)


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 3 * 4 * 4), (torch.bfloat16, 3 * 4 * 2)])
def test_dropout_converts_its_mask(dtype, nbytes):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3, 4, dtype=dtype)
    assert scratch_bytes(graph.call_function(torch.ops.aten.native_dropout.default, (x, 0.2, True))) == nbytes
