"""Load the measured costs for a plan: those of this machine's devices, where the plan is for them."""
from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from hpml_compiler.options import Options
from hpml_compiler.plans.cache.cache_warnings import warn_of_cache
from passes.cost_model.measured.measured_collectives import CollectivePoint, MeasuredCollectives, read_points
from passes.cost_model.measured.measured_kernels import DeviceMeasurements
from passes.cost_model.measured.measurement_cache import MeasurementCache, device_key
from passes.cost_model.measured.mesh_prices import CachedMeasurements
from passes.errors import BadInput
from passes.hardware.cluster import Cluster


def sharing_key(device_type: str, ranks: int) -> str:
    """Key of the hardware that operations are measured on: the device, and on a CPU the number of ranks on the host."""
    return device_key(device_type) + (f", {ranks} ranks" if device_type == "cpu" else "")


def load(options: Options, cluster: Cluster, graph: str = "") -> CachedMeasurements | None:
    """Measurements of `hpml profile` on the devices here, if the plan is for them and `costs` allows it; None without any.

    graph: hash of the graph that is planned.

    Raises BadInput if costs="measured" and there are none, or none can be read; else unreadable ones only cause a warning.
    """
    found, points = _read(options, cluster, graph)
    if found is None and not points:
        if options.costs == "measured":
            raise BadInput("costs=\"measured\", but there are no measurements of these devices", "options['costs']",
                           "run `hpml profile TARGET` on as many ranks as the plan has (under torchrun), or remove the option")
        return None
    kind = cluster.device.kind
    name = torch.cuda.get_device_name() if kind == "cuda" else ""
    collectives = MeasuredCollectives(points, lambda g: g.axis(kind, name), cluster.world_size) if points else None
    return CachedMeasurements(found or DeviceMeasurements(), collectives)


def for_given(options: Options, cluster: object) -> Options:
    """The options for a plan on a cluster that was given: "auto" costs are those of the data sheets of its devices, unless they
    are the ones here. `_read` knows a cluster that the options name."""
    if options.costs != "auto" or not isinstance(cluster, Cluster):
        return options
    device = cluster.groups[0].device
    if device.kind == "cuda" and not torch.cuda.is_available():
        return options
    name = torch.cuda.get_device_name() if device.kind == "cuda" else ""
    here = Cluster.local(cluster.world_size, device.kind, device_name=name).groups[0].device
    if replace(device, memory_bytes=here.memory_bytes) == here:
        return options
    return options.model_copy(update={"costs": "roofline"})


def digest(options: Options, cluster: Cluster, graph: str) -> str:
    """Digest of all measurements that `load` would use; it changes with new measurements."""
    return hashlib.sha256(repr(_read(options, cluster, graph)).encode()).hexdigest()[:16]


def _read(options: Options, cluster: Cluster, graph: str) -> tuple[DeviceMeasurements | None, list[CollectivePoint]]:
    kind, group = cluster.device.kind, cluster.groups[0]
    elsewhere = options.costs == "auto" and options.cluster is not None
    if options.costs == "roofline" or elsewhere or (kind == "cuda" and not torch.cuda.is_available()):
        return None, []
    try:
        with MeasurementCache() as cache:
            return (DeviceMeasurements.load(cache, sharing_key(kind, group.devices_per_node), graph),
                    read_points(cache, device_key(kind)))
    except BadInput as error:
        if options.costs == "measured":
            raise
        if not dist.is_initialized() or dist.get_rank() == 0:  # only the rank that plans
            warn_of_cache("costs are estimated: the measurements of `hpml profile` cannot be read", error)
        return None, []


def local_ranks() -> int:
    """Number of ranks of the present process group on this host; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if dist.is_initialized() else 1
