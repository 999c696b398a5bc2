"""Profile a model on the devices here: its heavy operations, its fused kernels, its optimizer, the runtime."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.api import Traces
from hpml_compiler.measurements import local_ranks, sharing_key
from hpml_compiler.options import Options
from hpml_compiler.planning import Annotated, plan_graph
from hpml_compiler.profile.operations import measure
from hpml_compiler.profile.steps import (
    collective_in_step_us,
    optimizer_traffic_us_per_element,
    optimizer_us,
    runtime_overhead,
    step_times,
)
from hpml_compiler.profile.variants import variants
from hpml_compiler.runtime.world import device_type
from passes.cluster import Cluster
from passes.costs import RooflineCost
from passes.costs.cache import Measurement, MeasurementCache
from passes.costs.measured import FACTOR, OPERATION, OPTIMIZER, OVERHEAD
from passes.mesh import Mesh, mesh_from_pin
from passes.operation_key import operation_key


@dataclass(frozen=True)
class ModelProfile:
    """What was found. operations: by key; failed: by key, why it could not be run alone; factors, overheads: by name."""

    device: str
    operations: Mapping[str, Measurement] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    overheads_us: Mapping[str, float] = field(default_factory=dict)


def profile_model(model: nn.Module, batch: Any, cache: MeasurementCache) -> ModelProfile:
    """Measure and keep in the cache.

    In a process group all ranks measure at once, as they will compute, and the slowest rank's times are kept. `model`
    and `batch` are real tensors on the device that is profiled; the model is not changed.
    """
    ranks, world = local_ranks(), dist.get_world_size() if dist.is_initialized() else 1
    graphs = Traces(model, batch, Options.parse({"costs": "roofline"})).whole
    found = {key: v for graph in graphs for key, v in variants(graph.gm, graph.graph, world).items()}
    operations, failed = measure(found.values())
    slowest = _slowest({key: m.median_us for key, m in operations.items()})
    operations = {key: replace(operations[key], median_us=us) for key, us in slowest.items()}
    factors, overheads = _whole_step(model, batch, graphs, slowest)
    if world > 1:
        added = runtime_overhead()
        overheads["graph"], overheads["tensor"] = added.graph_us, overheads["tensor"] + added.tensor_us
        overheads["collective"] = collective_in_step_us()
    factors, overheads = _slowest(factors), _slowest(overheads)
    profile = ModelProfile(sharing_key(device_type(), ranks), operations, failed, factors, overheads)
    if world == 1 or dist.get_rank() == 0:
        _keep(profile, graphs, cache)
    return profile


def _whole_step(model: nn.Module, batch: Any, graphs: list[Annotated], measured_us: Mapping[str, float],
                ) -> tuple[dict[str, float], dict[str, float]]:
    """Factors and overheads from steps of the model on this rank's device alone."""
    cluster, mesh = _one_device()
    launch_us, light_us, heavy_us, kernels = mesh.device.launch_latency_us, 0.0, 0.0, 0
    for graph in graphs:
        record = plan_graph(graph, Options.parse({"costs": "roofline", "memory_budget": "1TiB"}), cluster).record
        for op in graph.graph.operations:
            if op.heavy and op.outputs:
                key = operation_key(graph.graph, op, ((),) * len(op.inputs), ((),) * len(op.outputs), ())
                heavy_us += measured_us.get(key, max(record.operations[op.name].predicted_us - launch_us, 0.0))
                kernels += 1
        light = [op.predicted_us - launch_us for op in record.operations.values() if op.kind == "pointwise"]
        light_us, kernels = light_us + sum(light), kernels + len(light)
    times = step_times(model, batch)
    factors = {"pointwise": times.fused_us / light_us} if light_us > 0 and times.fused_us > 0 else {}
    host_us = max(times.wall_us - (times.fused_us or light_us) - heavy_us, 0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    updating_us, elements = optimizer_us([p.detach() for p in trained]), sum(p.numel() for p in trained)
    # Small parameters may lie in a cache: then all of their time is traffic, and there is less of it.
    traffic_us = min(optimizer_traffic_us_per_element(), updating_us / elements)
    factors[OPTIMIZER] = traffic_us / RooflineCost(mesh.device, mesh).optimizer_us(1.0)
    tensor_us = (updating_us - traffic_us * elements) / len(trained)
    return factors, {"launch": host_us / max(kernels, 1), "tensor": tensor_us}


def _one_device() -> tuple[Cluster, Mesh]:
    """One of this machine's devices, as fast as it is while the other ranks compute too."""
    name = torch.cuda.get_device_name() if device_type() == "cuda" else ""
    group = Cluster.local(local_ranks(), device_type(), device_name=name).groups[0]
    cluster = Cluster((replace(group, nodes=1, devices_per_node=1),))
    return cluster, mesh_from_pin({}, cluster)


def _slowest(values: Mapping[str, float]) -> dict[str, float]:
    """Of each value the largest of all ranks; all ranks have the same names, since they trace the same model."""
    if not dist.is_initialized():
        return dict(values)
    keys = sorted(values)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {key: values[key] for key in keys})
    common = set.intersection(*(set(each) for each in gathered))
    return {key: max(each[key] for each in gathered) for key in keys if key in common}


def _keep(profile: ModelProfile, graphs: list[Annotated], cache: MeasurementCache) -> None:
    of = "+".join(graph.hash() for graph in graphs)
    cache.put_all(profile.device, OPERATION, dict(profile.operations))
    for kind, values in ((FACTOR, profile.factors), (OVERHEAD, profile.overheads_us)):
        cache.put_all(profile.device, kind, {f"{name}@{of}": Measurement(value, 1) for name, value in values.items()})
