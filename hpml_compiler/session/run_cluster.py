"""The cluster that this process and its peers run on."""
from __future__ import annotations

import torch

from hpml_compiler.options import Options
from hpml_compiler.runtime.process.compute_device import device_type, memory_bytes
from passes.hardware.cluster import Cluster


def local_cluster(options: Options, world: int) -> Cluster:
    """The cluster named by the options, else one of this machine's devices."""
    if options.cluster is not None:
        return Cluster.parse(options.cluster)
    kind = device_type()
    if kind == "cuda":
        return Cluster.local(world, "cuda", device_name=torch.cuda.get_device_name(), memory_bytes=memory_bytes())
    return Cluster.local(world, "cpu")
