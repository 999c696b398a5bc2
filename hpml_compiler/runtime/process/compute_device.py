"""Device type of this rank, and the backend for collectives of CUDA tensors.

A script for one device may call `.to("cuda")`, may compute on the CPU of a machine with GPUs, and several ranks may share
one GPU. The device is therefore determined by the inputs of the first compiled graph.
"""
from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from passes import compat
from passes.errors import BadInput
from passes.session_state import state, state_of

CUDA_BYTES = 2**30
"""Approximate GPU memory of CUDA's context, the workspaces of cuBLAS and cuDNN, and nccl's buffers."""
OWN_GPU = "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the model is moved, or start with `hpml run`"


@dataclass(frozen=True)
class RankDevice:
    """Device of this rank. kind: cpu or cuda. sharing: number of ranks on this rank's GPU; 1 on CPUs."""

    kind: str
    sharing: int = 1


@dataclass
class _SettledDevice:
    """The device that the ranks of `group` agreed on. Keeps the group alive, so that a later one has another id."""

    group: Any = None
    device: RankDevice | None = None


def _settled() -> RankDevice | None:
    found = state_of(_SettledDevice)
    return found.device if found.group is dist.group.WORLD else None


def forget_device() -> None:
    """Reset the device; the next graph determines it again."""
    state.put(_SettledDevice())


def device_type() -> str:
    """Device type of the ranks, cpu or cuda: that of the first graph, or before it, of the process group's backend."""
    if (settled := _settled()) is not None:
        return settled.kind
    if not torch.cuda.is_available():
        return "cpu"
    if not dist.is_initialized():
        return "cuda"
    # A script's plain "gloo" group also supports cuda, so it is no evidence; a backend given explicitly for cuda is.
    return "cuda" if "nccl" in dist.get_backend_config() or "cuda:" in dist.get_backend() else "cpu"


def sends_through_host(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """True where messages between two ranks have to be copied to host memory first: gloo's collectives take CUDA tensors, but
    its sends do not."""
    return device.type == "cuda" and "cuda:gloo" in dist.get_backend_config(group)


def ranks_on_this_device() -> int:
    """Ranks that share this rank's GPU; 1 on CPUs."""
    settled = _settled()
    return 1 if settled is None else settled.sharing


def memory_bytes() -> int:
    """GPU memory available to this rank: its share of torch's limit on the current GPU, minus `CUDA_BYTES`."""
    index = torch.cuda.current_device()
    allowed = torch.cuda.get_device_properties(index).total_memory * torch.cuda.get_per_process_memory_fraction(index)
    return int(allowed / ranks_on_this_device()) - CUDA_BYTES


def init_device(tensors: Iterable[Any]) -> None:
    """Determine the device type from the inputs of a graph, once per process group. All ranks must call this together.

    Raises BadInput on all ranks if the ranks' device types differ, or if ranks share a GPU with the nccl backend.
    """
    if _settled() is not None:
        return
    if not torch.cuda.is_available():
        state.put(_SettledDevice(dist.group.WORLD, RankDevice("cpu")))
        return
    indices = [t.device.index for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
    if indices:
        torch.cuda.set_device(indices[0])  # streams, events and new tensors are those of the current device
    mine = gpu_name() if indices else "cpu"
    names: list[Any] = [None] * dist.get_world_size()
    with compat.outside_tracing():
        dist.all_gather_object(names, mine)
    device = agreed(names, dist.get_rank(), dist.get_backend_config())
    if device.kind == "cuda" and "nccl" not in dist.get_backend_config():
        compat.collectives_through_host()
    state.put(_SettledDevice(dist.group.WORLD, device))


def agreed(names: list[str], rank: int, backends: str) -> RankDevice:
    """This rank's device from the names of all ranks' devices ("cpu" or a unique name of a GPU). Raises BadInput."""
    kinds = ["cpu" if name == "cpu" else "cuda" for name in names]
    if len(set(kinds)) > 1:
        raise BadInput(f"rank {kinds.index('cpu')} computes on a CPU and rank {kinds.index('cuda')} on a GPU",
                       "inputs of the first compiled graph",
                       "move the model and the batch to the same kind of device on all ranks")
    if kinds[0] == "cpu":
        return RankDevice("cpu")
    sharing = {name: [r for r, other in enumerate(names) if other == name] for name in names}
    shared = next((ranks for ranks in sharing.values() if len(ranks) > 1), None)
    if shared is not None and "nccl" in backends:
        raise BadInput(f"ranks {shared} use the same GPU, but nccl needs one GPU per rank",
                       f"{names[shared[0]]}, process group {backends}",
                       f"{OWN_GPU}; to share a GPU anyway: init_process_group('cpu:gloo,cuda:gloo')")
    return RankDevice("cuda", len(sharing[names[rank]]))


def gpu_name() -> str:
    """Name of the current GPU that is unique over all hosts."""
    return f"{socket.gethostname()}: GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def init_group_on_gpus(timeout: timedelta) -> None:
    """Create the process group on a machine with GPUs: gloo for CPU tensors; for CUDA tensors nccl, or gloo if ranks share a
    GPU, which nccl does not support. Makes the rank's own GPU the current one unless the script has chosen one.

    If a rank sees fewer GPUs than the node has ranks, each rank may see only its own, or ranks share: they exchange names.
    """
    count = torch.cuda.device_count()
    if torch.cuda.current_device() == 0:  # the default, which `.to("cuda")` used
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) <= count:
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        return
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # A fast rank may create its next group while another still reads the names for this one.
    number = store.add(f"hpml/gpu/groups/{rank}", 1)
    store.set(f"hpml/gpu/{number}/{rank}", gpu_name())
    gpus = [store.get(f"hpml/gpu/{number}/{r}") for r in range(world)]
    shared = len(set(gpus)) < world
    if shared:
        compat.collectives_through_host()
    dist.init_process_group(f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}", store=store, rank=rank, world_size=world,
                            timeout=timeout)


def moved(batch: Any, kind: str) -> Any:
    """Move the tensors of a batch to a type of device."""
    return compat.pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(kind), batch)
