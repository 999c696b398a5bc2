"""Profile a model on the present devices: heavy operations, fused kernels, optimizer and runtime overheads."""
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.graph.measured_costs import local_ranks, sharing_key
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.profile.heavy_operations import operation_calls
from hpml_compiler.profile.runtime_overhead import RuntimeOverhead, runtime_calls
from hpml_compiler.profile.strategy_variants import variants
from hpml_compiler.profile.timing import TimedCall, as_measurement, in_rounds, slowest_us
from hpml_compiler.profile.training_steps import LARGE_ELEMENTS, LARGE_TENSORS, ModelStep, large_optimizer_step, optimizer_step
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.session import session
from passes.cost_model import RooflineCost
from passes.cost_model.measured.measured_kernels import FACTOR, OPERATION, OPTIMIZER, OVERHEAD
from passes.cost_model.measured.measurement_cache import MeasurementCache, TimedMeasurement
from passes.cost_model.measured.measurement_key import measurement_key_of
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import Mesh, mesh_from_pin

STEP, UPDATE, TRAFFIC = "step", "optimizer", "large optimizer"
BURSTS = 3
"""Number of profiler runs for fused kernels, between the rounds of timing. (A profiler is slow to start.)"""


@dataclass(frozen=True)
class ModelProfile:
    """Measurements of a model. operations: by key. failed: error of operations that could not run alone, by key. factors,
    overheads_us: by name."""

    device: str
    operations: Mapping[str, TimedMeasurement] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    overheads_us: Mapping[str, float] = field(default_factory=dict)


def profile_model(model: nn.Module, batch: Any, cache: MeasurementCache, seconds: float = 15.0) -> ModelProfile:
    """Profile a model for about `seconds`, excluding compilation, and store the medians in the cache.

    In a process group all ranks measure at the same time, as in training, and the slowest rank's times count. `model` and
    `batch` are real tensors on the profiled device; the model is not changed.
    """
    torch.compiler.reset()
    session.reset()
    profiler = ModelProfiler(model, batch)
    for _ in range(BURSTS):
        profiler.sample(seconds / BURSTS)
    torch.compiler.reset()
    session.reset()
    return profiler.keep(cache)


class ModelProfiler:
    """Compiled and warmed-up calls of everything that is timed for a model. All ranks must make and call it together."""

    def __init__(self, model: nn.Module, batch: Any):
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.graphs = TracedModel(model, batch, Options.parse({"costs": "roofline"})).whole
        found = {key: v for graph in self.graphs for key, v in variants(graph.gm, graph.graph, self.world).items()}
        self.operations, self.failed = operation_calls(found.values())
        self.trained = [p.detach() for p in model.parameters() if p.requires_grad]
        self.step = ModelStep(model, batch)
        self.calls = {
            STEP: TimedCall(self.step.call, samples=3, warm=1),
            UPDATE: TimedCall(optimizer_step(self.trained), samples=3, warm=1),
            TRAFFIC: TimedCall(large_optimizer_step()), **(runtime_calls() if self.world > 1 else {}), **self.operations,
        }
        self.samples: dict[str, list[float]] = {name: [] for name in self.calls}

    def sample(self, seconds: float) -> None:
        """Profile the fused kernels of some steps, then time all calls in rounds for about `seconds`."""
        self.step.profile()
        for name, us in in_rounds(self.calls, seconds).items():
            self.samples[name] += us

    def keep(self, cache: MeasurementCache) -> ModelProfile:
        """The profile of all samples so far; rank 0 stores it in the cache."""
        (fused_us,) = slowest_us([self.step.fused_us])
        us = {name: statistics.median(some) for name, some in self.samples.items() if some}
        factors, overheads = _whole_step(self.graphs, us, fused_us, self.trained)
        if self.world > 1:
            added = RuntimeOverhead.of(us)
            overheads["tensor"] += added.tensor_us
            overheads |= {"graph": added.graph_us, "collective": added.collective_us}
        measured = {key: as_measurement(self.samples[key]) for key in self.operations if self.samples[key]}
        device = sharing_key(device_type(), local_ranks())
        profile = ModelProfile(device, measured, self.failed, factors, overheads)
        if self.world == 1 or dist.get_rank() == 0:
            _keep(profile, self.graphs, cache)
        return profile


def _whole_step(graphs: list[AnalyzedGraph], us: Mapping[str, float], fused_us: float, trained: Sequence[torch.Tensor],
                ) -> tuple[dict[str, float], dict[str, float]]:
    """Factors and overheads from steps of the whole model on this rank's device."""
    cluster, mesh = one_device()
    launch_us, light_us, heavy_us, kernels = mesh.device.launch_latency_us, 0.0, 0.0, 0
    for graph in graphs:
        record = plan_graph(graph, Options.parse({"costs": "roofline", "memory_budget": "1TiB"}), cluster).record
        for op in graph.graph.operations:
            if op.heavy and op.outputs:
                key = measurement_key_of(graph.graph, op, ((),) * len(op.inputs), ((),) * len(op.outputs), ())
                heavy_us += us.get(key, max(record.operations[op.name].predicted_us - launch_us, 0.0))
                kernels += 1
        light = [op.predicted_us - launch_us for op in record.operations.values() if op.kind == "pointwise"]
        light_us, kernels = light_us + sum(light), kernels + len(light)
    factors = {"pointwise": fused_us / light_us} if light_us > 0 and fused_us > 0 else {}
    host_us = max(us[STEP] - (fused_us or light_us) - heavy_us, 0.0)
    elements = sum(p.numel() for p in trained)
    # Small parameters may fit in a cache: then all of their time is counted as traffic, and there is less of it.
    traffic_us = min(us[TRAFFIC] / (LARGE_ELEMENTS * LARGE_TENSORS), us[UPDATE] / elements)
    factors[OPTIMIZER] = traffic_us / RooflineCost(mesh.device, mesh).optimizer_us(1.0)
    tensor_us = max(us[UPDATE] - traffic_us * elements, 0.0) / len(trained)  # may be slightly negative by rounding
    return factors, {"launch": host_us / max(kernels, 1), "tensor": tensor_us}


def one_device() -> tuple[Cluster, Mesh]:
    """Cluster and mesh of one of this machine's devices, with its speed while the other ranks compute too."""
    name = torch.cuda.get_device_name() if device_type() == "cuda" else ""
    group = Cluster.local(local_ranks(), device_type(), device_name=name).groups[0]
    cluster = Cluster((replace(group, nodes=1, devices_per_node=1),))
    return cluster, mesh_from_pin({}, cluster)


def _keep(profile: ModelProfile, graphs: list[AnalyzedGraph], cache: MeasurementCache) -> None:
    of = "+".join(graph.hash() for graph in graphs)
    cache.put_all(profile.device, OPERATION, dict(profile.operations))
    for kind, values in ((FACTOR, profile.factors), (OVERHEAD, profile.overheads_us)):
        cache.put_all(profile.device, kind, {f"{name}@{of}": TimedMeasurement(value, 1) for name, value in values.items()})
