"""A traced step -> forward's saved values, against those that autograd of the compiled model saves."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from passes.graph.placement_graph import PlacementGraph
from passes.graph.step_phase import FORWARD
from passes.presets import annotate
from passes.tracing.joint_trace import trace
from tests.passes.traced import transformer


def graph_of(model: nn.Module, *batch: torch.Tensor) -> PlacementGraph:
    (traced,) = trace(model, batch)
    return annotate(traced.gm, traced.inputs, traced.forward_outputs).graph


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Checkpointed(Deep):
    """With dropout, which is no business of a process without devices."""

    def forward(self, x):
        for block in self.blocks:
            x = nn.functional.dropout(checkpoint(block, x, use_reentrant=False), 0.1)
        return x.square().mean()


def held_bytes(model: nn.Module, *batch: torch.Tensor) -> int:
    """Of tensors that the compiled model's forward keeps for backward, but for parameters and inputs."""
    kept: dict[int, int] = {}
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *batch)}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    torch.compiler.reset()
    call = torch.compile(model, backend="inductor")
    call(*batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*batch)
    torch.compiler.reset()
    return sum(kept.values())


@pytest.mark.parametrize("make", [
    lambda: (Deep(), (torch.randn(4, 8, 16),)),
    lambda: transformer(vocabulary=65, width=32, heads=2, layers=2, rows=4, length=16),
    lambda: (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), (torch.randn(4, 8, 16),)),
    lambda: (Checkpointed(), (torch.randn(4, 8, 16),)),
], ids=["deep", "gpt", "mlp", "checkpointed"])
def test_as_many_bytes_as_the_compiled_model_keeps(make):
    torch.manual_seed(0)
    model, batch = make()
    graph = graph_of(model, *batch)
    saved = sum(graph.values[v].bytes for v in graph.saved)
    assert saved == pytest.approx(held_bytes(model, *batch), rel=0.1)


def test_repeated_blocks_keep_the_same():
    graph = graph_of(Deep(layers=5), torch.randn(4, 8, 16))
    per_block: dict[str, list[str]] = {}
    for op in graph.operations:
        names = [op.target for v in op.outputs if v in graph.saved]
        if op.block.startswith("blocks") and op.phase == FORWARD:
            per_block.setdefault(op.block, []).extend(names)
    assert len(per_block) == 5 and len({tuple(names) for names in per_block.values()}) == 1
    assert all(per_block.values())


class Masked(nn.Module):
    """Each block computes the same mask anew, which backward needs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, key):
        for block in self.blocks:
            x = block(x) * (key @ key.T).softmax(0)
        return x.square().mean()


def test_what_all_blocks_compute_alike_is_held_once():
    graph = graph_of(Masked(), torch.randn(16, 16), torch.randn(16, 16))
    of_keys = [v for v in graph.saved if graph.values[v].spec.shape == (16, 16)
               and "mm" not in graph.operations[graph.values[v].producer or 0].target]
    masks = [op for op in graph.operations if "amax" in op.target]
    assert len(masks) == 3, "the traced graph has it three times"
    x = torch.randn(16, 16)
    saved = sum(graph.values[v].bytes for v in graph.saved)
    assert saved == pytest.approx(held_bytes(Masked(), x, x.clone()), rel=0.05), of_keys


def test_inputs_parameters_and_views_are_not_among_them():
    graph = graph_of(Deep(), torch.randn(4, 8, 16))
    for v in graph.saved:
        producer = graph.values[v].producer
        assert producer is not None and graph.operations[producer].kind != "view"
