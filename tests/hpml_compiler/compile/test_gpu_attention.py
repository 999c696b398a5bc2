"""Kernels of attention on GPUs, which return numbers and generator states beside tensors -> split like any other operation.

The kernels are the stand-ins of the rules' tests, registered for the CPU."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpml_compiler.session import session
from tests.helpers.frozen import fresh
from tests.passes.op_rules.families import test_attention as stand_ins

WIDTH, HEADS, ROWS, LENGTH = 32, 4, 8, 12
KERNELS = {"flash": 8, "cudnn": 11}
"""Kernels, each with the position of the lengths of queries and keys among the arguments of backward."""


class Attention(nn.Module):
    def __init__(self, kind: str, causal: bool):
        super().__init__()
        self.kind, self.causal, self.qkv, self.out = kind, causal, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.kind == "flash":
            y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal)[0]
        else:
            y = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, self.causal)[0]
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str, causal: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(kind, causal) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gradients(grad, q, k, v, out, causal):
    """By the formula: autograd does not record inside a kernel."""
    scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    weights = scores.softmax(-1)
    made = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return made @ k, made.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def on_the_cpu(kind: str) -> torch.library.Library:
    """The stand-ins as kernels for the CPU, as long as the result lives."""
    lengths = KERNELS[kind]

    def backward(grad, q, k, v, out, *others, scale=None):
        assert others[lengths - 5:][:2] == (q.shape[2], k.shape[2])
        return gradients(grad, q, k, v, out, others[lengths - 5 + 3])

    library = torch.library.Library("aten", "IMPL")
    library.impl(f"_scaled_dot_product_{kind}_attention", getattr(stand_ins, kind), "CPU")
    library.impl(f"_scaled_dot_product_{kind}_attention_backward", backward, "CPU")
    return library


def trained(kind: str, causal: bool, options: dict[str, Any] | None) -> list[torch.Tensor]:
    fresh()
    model = Model(kind, causal).double()
    call = model if options is None else torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.linspace(-1, 1, ROWS * LENGTH * WIDTH).double().view(ROWS, LENGTH, WIDTH).sin(), []
    for _ in range(2):
        loss = call(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


CASES: list[tuple[bool, dict[str, Any]]] = [
    (True, {"mesh": {"dp": 2}, "microbatches": 2}), (False, {"mesh": {"tp": 2}}),
    (True, {"mesh": {"pp": 2}, "microbatches": 2})]


def on_ranks(rank: int, kind: str) -> None:
    library = on_the_cpu(kind)
    for causal, options in CASES:
        expected = trained(kind, causal, None)
        torch.testing.assert_close(trained(kind, causal, options), expected, rtol=1e-12, atol=0.0)
        (graph,) = session.last_plan().graphs
        attention = [name for name in graph.operations if name.startswith("_scaled_dot_product")]
        assert len(attention) == 4
        if "pp" not in options["mesh"]:
            assert all("S" in str(placement) for name in attention for placement in graph.operations[name].inputs[:3])
        assert graph.microbatches is None or graph.microbatches.share == 1.0
    library._destroy()


@pytest.mark.parametrize("kind", KERNELS)
def test_attention_on_gpus_is_split(launch, kind):
    launch(on_ranks, args=(kind,))
