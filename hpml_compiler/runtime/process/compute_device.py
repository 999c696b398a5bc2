"""Which device this rank computes on, and how the ranks' CUDA tensors can travel.

A script for one device says `.to("cuda")`, on a machine with GPUs it may as well compute on the CPU, and several ranks may
share one GPU. So nothing is taken for granted: what the first compiled graph is given decides.
"""
from __future__ import annotations

import itertools
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

CUDA_BYTES = 2**30
"""About what CUDA's context, the workspaces of cuBLAS and cuDNN and the buffers of nccl take of a GPU beside tensors."""
OWN_GPU = "say torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the model is moved, or start with `hpml run`"


@dataclass(frozen=True)
class RankDevice:
    """kind: cpu or cuda. sharing: ranks that compute on this rank's device; on CPUs 1, since those share cores anyway."""

    kind: str
    sharing: int = 1


_groups_made = itertools.count()
_settled: tuple[Any, RankDevice] | None = None
"""In which process group: kept, so that a later one, of which ranks have to agree anew, is never taken for it."""


def forget_device() -> None:
    """The next graph decides anew."""
    global _settled
    _settled = None


def device_type() -> str:
    """What the ranks compute on, cpu or cuda: what the first graph did; before there is one, what the process group is for."""
    if _settled is not None and _settled[0] is dist.group.WORLD:
        return _settled[1].kind
    if not torch.cuda.is_available():
        return "cpu"
    if not dist.is_initialized():
        return "cuda"
    # A script's own "gloo" group stands for cuda too, but says nothing; one with a backend named for cuda does.
    return "cuda" if "nccl" in dist.get_backend_config() or "cuda:" in dist.get_backend() else "cpu"


def ranks_on_this_device() -> int:
    """Ranks that share this rank's GPU; 1 on CPUs."""
    return _settled[1].sharing if _settled is not None and _settled[0] is dist.group.WORLD else 1


def memory_bytes() -> int:
    """What a rank may use of the current GPU: its share of what torch may use of it, without CUDA's own."""
    index = torch.cuda.current_device()
    allowed = torch.cuda.get_device_properties(index).total_memory * torch.cuda.get_per_process_memory_fraction(index)
    return int(allowed / ranks_on_this_device()) - CUDA_BYTES


def init_device(tensors: Iterable[Any]) -> None:
    """To be called by all ranks together with the inputs of a graph: the first time in a process group, all agree on what
    they compute on. Raises BadInput on all ranks if that differs, or if ranks share a GPU and the group is nccl's.
    """
    global _settled
    if _settled is not None and _settled[0] is dist.group.WORLD:
        return
    if not torch.cuda.is_available():
        _settled = dist.group.WORLD, RankDevice("cpu")
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
    _settled = dist.group.WORLD, device


def agreed(names: list[str], rank: int, backends: str) -> RankDevice:
    """What the ranks compute on, from the name of each one's device: "cpu", or that of a GPU, which no other has."""
    kinds = ["cpu" if name == "cpu" else "cuda" for name in names]
    if len(set(kinds)) > 1:
        raise BadInput(f"rank {kinds.index('cpu')} computes on a CPU and rank {kinds.index('cuda')} on a GPU",
                       "inputs of the first compiled graph", "move the model and its batch to the same kind of device on all")
    if kinds[0] == "cpu":
        return RankDevice("cpu")
    sharing = {name: [r for r, other in enumerate(names) if other == name] for name in names}
    shared = next((ranks for ranks in sharing.values() if len(ranks) > 1), None)
    if shared is not None and "nccl" in backends:
        raise BadInput(f"ranks {shared} compute on one GPU, and nccl wants one for each", f"{names[shared[0]]}, process group "
                       f"{backends}", f"{OWN_GPU}; to share a GPU all the same: init_process_group('cpu:gloo,cuda:gloo')")
    return RankDevice("cuda", len(sharing[names[rank]]))


def gpu_name() -> str:
    """The current GPU, by a name that no other of any host has."""
    return f"{socket.gethostname()}: GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def init_group_on_gpus(timeout: timedelta) -> None:
    """The process group of a machine with GPUs, a rank's own being the current one from here on, unless the script has
    chosen one. gloo for CPU tensors; for CUDA tensors nccl, or gloo where ranks share a GPU, which nccl refuses.

    Where a rank sees fewer GPUs than there are ranks beside it, each may see its own, or they share: they tell each other.
    """
    count = torch.cuda.device_count()
    if torch.cuda.current_device() == 0:  # the default, and what `.to("cuda")` took
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) <= count:
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        return
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    number = next(_groups_made)  # a rank that is ahead makes its next group while another still reads the names for this one
    store.set(f"hpml/gpu/{number}/{rank}", gpu_name())
    gpus = [store.get(f"hpml/gpu/{number}/{r}") for r in range(world)]
    shared = len(set(gpus)) < world
    if shared:
        compat.collectives_through_host()
    dist.init_process_group(f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}", store=store, rank=rank, world_size=world,
                            timeout=timeout)


def moved(batch: Any, kind: str) -> Any:
    """A batch with its tensors on a kind of device."""
    return compat.pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(kind), batch)
