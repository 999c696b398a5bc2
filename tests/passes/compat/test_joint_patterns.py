"""Which of inductor's patterns are readied for a joint graph."""
from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
from passes import compat
from torch._inductor.fx_passes import fuse_attention, joint_graph
from passes.tracing.joint_trace import joint_graphs

def plain(q):
    return (q @ q.t()).softmax(-1).sum()

def attention(q):
    return ((q @ q.transpose(-2, -1)).div(4.0).softmax(-1) @ q).sum()

def calls(function, *shape):
    (traced,) = joint_graphs(function, (torch.randn(shape, requires_grad=True),))
    gm = compat.inductor_joint_passes(traced.gm)
    return " ".join(str(node.target) for node in gm.graph.nodes)

ready, attentions = joint_graph.lazy_init, fuse_attention._sfdp_init
calls(plain, 8, 16)
assert attentions.cache_info().currsize == 0
assert "scaled_dot_product" in calls(attention, 2, 4, 8, 16)
assert attentions.cache_info().currsize == 1
calls(plain, 8, 16)
assert (ready, attentions) == (joint_graph.lazy_init, fuse_attention._sfdp_init)
"""


def test_attention_is_found_also_after_a_graph_that_had_none():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
