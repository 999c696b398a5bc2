"""Cost of offloading a saved activation and loading it back, if the options offload any."""
from __future__ import annotations

from collections.abc import Callable

from hpml_compiler.options import Options
from passes.hardware.cluster import Cluster


def offload_price(options: Options, cluster: Cluster) -> Callable[[int], float] | None:
    """Offload time in µs for a number of bytes, both ways, without overlap with compute; None where saved values stay on the
    device. A GPU copies to the memory of its host, a CPU to a file."""
    if not options.offloads("saved"):
        return None
    group = cluster.groups[0]
    link = group.storage if group.device.kind == "cpu" else group.host
    bytes_per_us = link.device_bytes_per_s(group.devices_per_node) / 1e6
    return lambda nbytes: 2 * (link.latency_us + nbytes / bytes_per_us)
