"""recompute per block: the numbers stay the same bit for bit, and the pinned activations are recomputed or saved."""
from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from passes.errors import BadInput
from tests.helpers.plans import plan_of_ranks
from tests.hpml_compiler.runtime.common import full

WIDTH, HEADS, ROWS, LENGTH = 32, 4, 8, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = F.dropout((q @ k.transpose(-1, -2) / 4).softmax(-1), 0.2, self.training)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """Layers that are compiled one by one: no graph has repeated blocks."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        for layer in self.layers if options else ():
            layer.compile(backend="hpml", options=options)

    def forward(self, x):
        return self.layers[1](self.layers[0](x)).square().mean()


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(WIDTH, 8)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.randint(0, 8, (ROWS, LENGTH))


def stepped(recompute: Any, **options: Any) -> list[torch.Tensor]:
    """Loss and gradients of a step."""
    hpml_compiler.reset()
    call = torch.compile(found := model(), backend="hpml", options={"compiler": "eager", "recompute": recompute, **options})
    torch.manual_seed(2)
    loss = call(*batch())
    loss.backward()
    return [loss.detach(), *(full(p.grad) for p in found.parameters())]


def trained(recompute: Any, **options: Any):
    """Loss and gradients of a step, and the plan's record of its saved activations."""
    return stepped(recompute, **options), hpml_compiler.last_plan().graphs[0].kept


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_blocks_save_or_recompute_as_pinned(microbatches):
    found = {mode: trained(mode, microbatches=microbatches) for mode in ("none", "selective", "full")}
    numbers, kept = found["none"]
    assert all(same(numbers, each) for each, _ in found.values()), "dropout masks included"
    # Factors of gradients need no gradient themselves: they belong to backward, which computes them in any case.
    assert not any(op in name for name in kept.again for op in ("mm", "amax", "var_mean", "native_dropout")), "saves the rest"
    saved = [kept.saved_bytes for _, kept in found.values()]
    assert saved[0] > saved[1] > saved[2]
    inside = found["selective"][1].again
    assert {call.block for call in inside.values() if call.block} == {f"layers.{k}" for k in range(3)}
    assert not any("addmm" in name or "gelu" in name or name.startswith("mm") for name in inside), "linear layers run once"
    own = [value for value in found["full"][1].saved.values() if value.block == "layers.1"]
    assert sum(value.bytes for value in own) < 0.2 * sum(
        value.bytes for value in kept.saved.values() if value.block == "layers.1")


@pytest.mark.parametrize("mode, saved", [("none", [1, 8, 8] * 3), ("selective", []), ("full", [])])
def test_inductors_masks_are_drawn_again_from_their_seeds(mode, saved):
    """Saved values of each layer: a mask, and the weights before and behind it, in bytes per element; or nothing."""
    kept = hpml_compiler.plan(model(), batch(), cluster="1x1:cpu", recompute=mode).graphs[0].kept
    scores = ROWS * HEADS * LENGTH**2
    assert sorted(value.bytes / scores for value in kept.saved.values() if value.bytes in (scores, 8 * scores) and value.block
                  ) == sorted(saved)


def test_of_several_patterns_the_last_match_counts():
    (numbers, kept), (reference, _) = trained({"layers.*": "full", "layers.1": "none"}), trained("none")
    assert same(numbers, reference)
    assert {call.block for call in kept.again.values() if call.block} == {"layers.0", "layers.2"}


def test_a_plan_pins_the_same_activations_as_a_run():
    _, kept = trained("selective")
    plan = hpml_compiler.plan(model(), batch(), cluster="1x1:cpu", compiler="eager", recompute="selective")
    assert plan.graphs[0].kept.again.keys() == kept.again.keys()
    assert plan.graphs[0].kept.saved_bytes == kept.saved_bytes


def test_few_layers_stand_for_all():
    deep = Model(12).double()
    few, whole = (hpml_compiler.plan(deep, batch(), cluster="1x1:cpu", compiler="eager", recompute="full",
                                     trace_all_layers=every).graphs[0].kept for every in (False, True))
    assert few.saved_bytes == pytest.approx(whole.saved_bytes, rel=0.02), "traced with other decompositions"


def test_a_pattern_without_a_block_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        trained({"layrs.*": "full"})
    assert "'layrs.*' of options['recompute'] matches none of its blocks: layers.0, layers.1, layers.2" in caplog.text


def on_ranks(_rank: int, options: dict[str, Any]):
    numbers, kept = trained("full", **options)
    return numbers, kept, one_by_one(options)


def one_by_one(options: dict[str, Any]):
    """Gradients of blocks that are compiled by themselves and recompute all but their inputs; in eager mode without options."""
    hpml_compiler.reset()
    torch.manual_seed(0)
    found = Blocks({"compiler": "eager", "recompute": "full", **options} if options else {}).double()
    torch.manual_seed(2)
    found(batch()[0]).backward()
    kept = hpml_compiler.last_plan().graphs[0].kept if options else None
    return [full(p.grad) for p in found.parameters()], kept


@pytest.mark.parametrize("options", [{"mesh": {"dp": 2}, "zero": 3}, {"mesh": {"tp": 2}, "microbatches": 2}])
def test_ranks_recompute_alike(launch, options):
    expected, _ = trained("none")
    (ours, kept, (gradients, own)), (_, others, _) = launch(on_ranks, 2, (options,))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients, one_by_one({})[0], rtol=1e-9, atol=1e-12)
    assert sorted(kept.again) == sorted(others.again) and kept.again, "both ranks recompute the same calls"
    assert not any("wait" in name for name in own.saved), "no gathered parameter is saved"
    inputs = ROWS * LENGTH * WIDTH * 8
    assert own.saved_bytes < 2 * inputs, "a graph without repeated layers is one block; masks of dropout are saved"


def test_values_are_checked():
    with pytest.raises(BadInput, match="recompute"):
        hpml_compiler.plan(model(), batch(), cluster="1x1:cpu", recompute="everything")


def in_stages(_rank: int, options: dict[str, Any]):
    numbers = stepped("full", **options)
    pipe = plan_of_ranks().graphs[0].pipeline
    return numbers, [stage.kept and len(stage.kept.again) for stage in pipe.stages]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_recompute_their_blocks(launch, schedule):
    expected, _ = trained("none", microbatches=2)
    options = {"mesh": {"pp": 2}, "microbatches": 2, "schedule": schedule}
    (ours, again), _ = launch(in_stages, 2, (options,))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert all(again)
