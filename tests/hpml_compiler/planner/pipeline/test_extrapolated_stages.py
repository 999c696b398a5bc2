"""A deep model, of which a few layers are traced -> the stages that it has when all layers are."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.graph.stage_gathers import StageGathers

LAYERS = 8


class EncoderDecoder(nn.Module):
    """What the encoder makes is read by every layer of the decoder."""

    def __init__(self, width: int = 64, layers: int = 8):
        super().__init__()
        self.table = nn.Embedding(32, width)
        self.encoder, self.decoder = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))

    def forward(self, tokens, labels):
        x = y = self.table(tokens)
        for layer in self.encoder:
            x = x + layer(x).relu()
        for layer in self.decoder:
            y = y + (layer(y) * x).relu()
        return nn.functional.cross_entropy((y @ self.table.weight.t()).flatten(0, 1), labels.flatten())


def planned(model, cluster="1x4:a100-80g", rows=16, **options):
    tokens = torch.zeros(rows, 16, dtype=torch.long)
    made = hpml_compiler.plan(model, (tokens, tokens), cluster=cluster, microbatches=4, **options)
    assert isinstance(made, Plan)
    return made.graphs[0]


def gpt():
    return GPT(width=128, heads=2, layers=LAYERS, length=16)


def layers_of(stage):
    return [name for name in stage.blocks if name[-1:].isdigit() and "@" not in name]


def test_few_layers_tell_what_all_of_them_would():
    options = {"mesh": {"pp": 2, "tp": 2}, "schedule": "interleaved", "virtual_stages": 2}
    short, long = (planned(gpt(), trace_all_layers=whole, **options) for whole in (False, True))
    assert short.graph_hash.startswith("shortened:") and not long.graph_hash.startswith("shortened:")
    assert len(short.pipeline.stages) == len(long.pipeline.stages)
    for a, b in zip(short.pipeline.stages, long.pipeline.stages):
        assert layers_of(a) == layers_of(b) and (a.rank, a.in_flight) == (b.rank, b.in_flight)
        assert (sorted(a.parameters), a.parameter_bytes) == (sorted(b.parameters), b.parameter_bytes)
        assert (a.forward_us, a.backward_us) == pytest.approx((b.forward_us, b.backward_us), rel=0.05)
        assert [(s.bytes, s.backward) for s in a.sends] == [(s.bytes, s.backward) for s in b.sends]
        assert (a.saved_bytes, a.kept.backward.bytes) == pytest.approx((b.saved_bytes, b.kept.backward.bytes), rel=0.02)
    assert short.predicted.step_time_us == pytest.approx(long.predicted.step_time_us, rel=0.03)
    assert short.memory.peak == pytest.approx(long.memory.peak, rel=0.02)


@pytest.mark.parametrize("options", [
    {"mesh": {"pp": 4}, "recompute": "full", "schedule": "zero_bubble"},
    {"mesh": {"pp": 2, "dp": 2}, "memory_budget": 0.7, "offload": "saved"}], ids=str)
def test_a_budget_is_met_with_the_values_that_few_layers_save(options):
    """memory_budget: as a share of the peak without one."""
    free = {"rows": 256, "mesh": options["mesh"], "schedule": options.get("schedule", "auto")}
    budget = options.get("memory_budget") and round(options["memory_budget"] * planned(gpt(), **free).memory.peak)
    short, long = (planned(gpt(), trace_all_layers=whole, rows=256, **{**options, "memory_budget": budget})
                   for whole in (False, True))
    assert short.graph_hash.startswith("shortened:") and any(stage.kept.again for stage in short.pipeline.stages)
    assert budget is None or 0.9 * budget < short.memory.peak <= budget
    assert short.memory.peak == pytest.approx(long.memory.peak, rel=0.1 if budget else 0.04)
    for a, b in zip(short.pipeline.stages, long.pipeline.stages):
        assert a.kept.saved_bytes == pytest.approx(b.kept.saved_bytes, rel=0.25 if budget else 0.02)
    assert short.predicted.step_time_us == pytest.approx(long.predicted.step_time_us, rel=0.05)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12))

    def forward(self, tokens, labels):
        x = self.table(tokens[:, 0])
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_budget_that_stages_meet_without_their_layers_inputs_takes_all_layers():
    options = {"mesh": {"pp": 4}, "rows": 256}
    short, long = (planned(Chain(), memory_budget=budget, **options) for budget in ("460KiB", "360KiB"))
    assert short.graph_hash.startswith("shortened:") and not long.graph_hash.startswith("shortened:")
    assert long.memory.peak <= 360 * 1024


def test_layers_of_an_encoder_and_of_a_decoder():
    short, long = (planned(EncoderDecoder(), mesh={"pp": 4}, trace_all_layers=whole) for whole in (False, True))
    for a, b in zip(short.pipeline.stages, long.pipeline.stages):
        assert layers_of(a) == layers_of(b)
        assert sorted(s.bytes for s in a.sends) == sorted(s.bytes for s in b.sends)
    assert short.predicted.step_time_us == pytest.approx(long.predicted.step_time_us, rel=0.05)


def test_a_rank_gathers_the_parameters_of_its_own_layers(monkeypatch):
    """Bytes that a rank frees by gathering in each microbatch, or by reducing in each."""
    found = []

    def spying(self):
        cut = self.cut(self.choice.pinned)
        groups = self._groups(cut)
        found.append([(sum(g.nbytes for g in groups[rank] if not g.reduces), sum(g.nbytes for g in groups[rank] if g.reduces))
                      for rank in range(len(cut.peaks))])
        return cut

    monkeypatch.setattr(StageGathers, "found", spying)
    for whole in (False, True):
        planned(gpt(), mesh={"pp": 2, "dp": 2}, zero=3, trace_all_layers=whole)
    short, long = found
    assert all(a == pytest.approx(b, rel=0.02) and min(b) > 0 for a, b in zip(short, long, strict=True))
