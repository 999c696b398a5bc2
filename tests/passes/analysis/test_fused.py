"""A call -> whether inductor computes it together with what it reads, and what it takes besides."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.analysis.fused import is_fusing, scratch_bytes
from tests.passes.traced import joint_graph

INDEX_BYTES = 2 * 3 * 2 * 2 * 8


class Pooling(nn.Module):
    def forward(self, x):
        return F.max_pool2d(x, 2).sin().sum()


@pytest.mark.parametrize(("threads", "fuses", "scratch"), [(1, True, 0), (2, False, INDEX_BYTES)])
def test_threads_that_would_add_to_the_same_memory_call_a_kernel(threads, fuses, scratch):
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gm, _ = joint_graph(Pooling(), (torch.ones(2, 3, 4, 4, requires_grad=True),))
        (added,) = (node for node in gm.graph.nodes if "scatter_add" in str(node.target))
        assert (is_fusing(added), scratch_bytes(added)) == (fuses, scratch)
    finally:
        torch.set_num_threads(usual)
