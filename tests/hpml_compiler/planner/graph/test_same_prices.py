"""One set of prices -> the plan with nothing pinned takes no longer than that of any pinned mesh, whatever the prices are."""
from __future__ import annotations

import random

import pytest
import torch

from hpml_compiler.demo.train import GPT
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.traced_model import TracedModel
from passes.cost_model.measured.measured_collectives import CollectivePoint, MeasuredCollectives, MeasuredGroup
from passes.cost_model.measured.measured_kernels import DeviceMeasurements
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.hardware.cluster import Cluster

GROUP = MeasuredGroup(size=4, stride=1, world_size=4, devices_per_node=4, backend="gloo")
MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2})


def drawn(seed: int) -> CachedMeasurements:
    """A quick profile as it may be on a machine that others use: each price is off by up to a factor of four."""
    draw = random.Random(seed)
    factors = {kind: 4 ** draw.uniform(-1, 1) for kind in ("matmul", "attention", "pointwise", "embedding", "optimizer")}
    points = [CollectivePoint(kind, GROUP, size, us * 4 ** draw.uniform(-1, 1))
              for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
              for size, us in ((2**12, 500.0), (2**18, 1000.0), (2**22, 4000.0))]
    return CachedMeasurements(DeviceMeasurements(factors=factors, collective_us=100.0 * draw.random()),
                              MeasuredCollectives(points, lambda group: group.axis("cpu"), 4))


def test_no_pinned_mesh_is_predicted_to_be_faster():
    tokens = torch.zeros(8, 32, dtype=torch.long)
    traces = TracedModel(GPT(width=64, heads=4, layers=1, length=32), (tokens, tokens), Options.parse({}))
    annotated, chosen = traces.whole[0], set()
    batch = frozenset(annotated.interface.positions.keys() - annotated.interface.names.keys())
    assert len(batch & {value.name for value in annotated.graph.values}) == len(batch) == 2
    for seed in range(4):
        prices, rows = drawn(seed), batch if seed % 2 else frozenset[str]()

        def step_us(mesh: dict[str, int], prices: CachedMeasurements = prices, rows: frozenset[str] = rows) -> float:
            record = plan_graph(annotated, Options.parse({"gap": 0.0, "mesh": mesh or None}), Cluster.parse("1x4:cpu"),
                                rows=rows, quick=prices).record
            assert record.predicted.step_time_us == pytest.approx(record.solver.cost, rel=1e-9)
            chosen.add((*record.mesh.items(), *(tuple(each.placements) for each in record.parameters.values())))
            return record.predicted.step_time_us

        assert step_us({}) <= min(map(step_us, MESHES)) * (1 + 1e-9)
    assert len(chosen) > 4
