"""Traced models before -> the calls they can come down to, and that each of them runs."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from hpml_compiler.demo.train import GPT
from hpml_compiler.options import Options
from hpml_compiler.planner.graph import graph_planning
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.profile.heavy_operations import operation_calls
from hpml_compiler.profile.strategy_variants import variants
from hpml_compiler.profile.timing import in_rounds
from passes.cost_model.measured.measured_kernels import DeviceMeasurements
from passes.cost_model.measured.mesh_prices import CachedMeasurements, MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin


class Images(nn.Module):
    """Convolutions, an embedding, a product whose operand is transposed."""

    def __init__(self):
        super().__init__()
        self.convolution, self.embedding = nn.Conv2d(4, 8, 3, stride=2), nn.Embedding(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(x).mean((2, 3)) + self.embedding(classes)).square().mean()


def traced(name: str) -> AnalyzedGraph:
    if name == "gpt":
        tokens = torch.zeros(4, 16, dtype=torch.long)
        model, batch = GPT(width=64, heads=2, layers=2, length=16), (tokens, tokens)
    else:
        model, batch = Images(), (torch.randn(4, 4, 9, 9), torch.zeros(4, dtype=torch.long))
    (graph,) = TracedModel(model, batch, Options.parse({"trace_all_layers": True})).whole
    return graph


@pytest.mark.parametrize("name", ["gpt", "images"])
def test_every_heavy_operation_of_every_plan_has_been_measured(name):
    """Whatever the solver chooses on two or four ranks, its operations are among the calls, and each of them runs."""
    graph = traced(name)
    for ranks, meshes in ((2, [{"x": 2}, {"dp": 2}, {"tp": 2}]), (4, [{"x": 4}, {"x": 2, "y": 2}])):
        found = variants(graph.gm, graph.graph, ranks)
        calls, failed = operation_calls(found.values()) if ranks == 2 else ({}, {})
        assert failed == {}
        assert all(us > 0 for samples in in_rounds(calls, 0.0).values() for us in samples)
        for mesh in meshes:
            asked = Asked()
            plan_with(asked, graph, mesh, ranks)
            assert asked.keys_seen and asked.keys_seen <= found.keys()


class Asked(dict):
    """Knows nothing, and remembers what it was asked for."""

    def __init__(self):
        super().__init__()
        self.keys_seen: set[str] = set()

    def get(self, key, default=None):
        self.keys_seen.add(key)
        return default


def plan_with(operations: dict, graph: AnalyzedGraph, mesh: dict[str, int], ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        measurements = CachedMeasurements(DeviceMeasurements(operations), None)
        patch.setattr(graph_planning.measured_costs, "load", lambda *_: measurements)
        plan_graph(graph, Options.parse({"mesh": mesh}), Cluster.local(ranks, "cpu"))


def test_measured_times_are_what_the_plan_charges(monkeypatch):
    """All operations at 100 us and nothing else: compute is 100 us for each, whatever the roofline says."""
    graph = traced("gpt")

    class Everything(dict):
        def get(self, key, default=None):
            return 100.0

    known = DeviceMeasurements(Everything(), {"pointwise": 1e-9}, launch_us=0.0, graph_us=7.0)
    monkeypatch.setattr(graph_planning.measured_costs, "load", lambda *_: CachedMeasurements(known, None))
    record = plan_graph(graph, Options.parse({"mesh": {"dp": 2}}), Cluster.local(2, "cpu")).record
    heavy = [op for op in record.operations.values() if op.kind not in ("view", "pointwise")]
    assert record.predicted.compute_us == pytest.approx(100.0 * len(heavy), rel=1e-6)
    assert record.predicted.overhead_us == 14.0
    parts = record.predicted
    assert parts.step_time_us == pytest.approx(
        parts.compute_us + parts.communication_us + parts.optimizer_us + parts.overhead_us)


def test_prices_without_measurements_are_those_of_the_roofline():
    graph = traced("images")
    cluster = Cluster.local(2, "cpu")
    record = plan_graph(graph, Options.parse({"mesh": {"dp": 2}, "costs": "roofline"}), cluster).record
    prices = MeshPrices(mesh_from_pin({"dp": 2}, cluster), 2)
    assert record.predicted.compute_us == pytest.approx(sum(
        prices.kernel(op.flops, op.bytes_moved, op.dtype, op.kind)
        for op in record.operations.values() if op.kind != "view"))
    assert record.predicted.overhead_us == 0.0
