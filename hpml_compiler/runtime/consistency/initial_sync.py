"""Broadcast parameters, buffers and RNG state from rank 0 where ranks differ."""
from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from hpml_compiler.runtime.consistency.checksums import exact_sum
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.live_objects import live_objects
from hpml_compiler.runtime.process.world_group import from_all_ranks
from passes import compat
from passes.graph.graph_signature import GraphInput
from passes.session_state import state_of

log = logging.getLogger("hpml")


class _SyncedTensors:
    """compared: tensors that were compared between ranks. different: what differed, for a warning at the first call."""

    def __init__(self) -> None:
        self.compared, self.different = WeakIdKeyDictionary(), list[str]()


def sync_module_states(tensors: Mapping[str, torch.Tensor]) -> None:
    """Broadcast these parameters and buffers from rank 0 where they differ, before they are sharded.

    All ranks must call this at the same point, with tensors of the same names, shapes and dtypes. Skips tensors that were
    compared before, and placed ones. If any differs, as in a script without a seed, compares the parameters and buffers of all
    modules in the process too.
    """
    with compat.outside_tracing(), torch.no_grad():
        different = _same_values(tensors)
        if different:
            _same_values(_of_all_modules())
    state_of(_SyncedTensors).different.extend(different)


def sync_rng() -> None:
    """Broadcast rank 0's RNG states where they differ, before the first call of a graph. (Not while it is compiled: Dynamo
    restores the earlier states.) Rank 0 logs one warning for this and `sync_module_states`."""
    synced = state_of(_SyncedTensors)
    different = [*synced.different, *(["the state of torch's random number generators"] if _same_generators() else [])]
    synced.different.clear()
    if different and dist.get_rank() == 0:
        log.warning("%s differed between ranks; broadcast from rank 0. Seed all ranks at the top of the script "
                    "(torch.manual_seed) to make runs repeatable", " and ".join(different))


def params_and_buffers(inputs: Sequence[GraphInput], arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Parameters and buffers among a graph's arguments, by unique names."""
    found: dict[str, torch.Tensor] = {}
    for i, (described, value) in enumerate(zip(inputs, arguments)):
        if described.kind in ("parameter", "buffer") or "_buffers" in described.name:
            found[described.name if described.name not in found else f"{described.name} ({i})"] = value
    return found


def sync_for_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Broadcast from rank 0, before the optimizer's first step and the first after a state was loaded, where ranks differ:
    parameters that are not placed, their gradients, and the unsharded tensors of the optimizer state."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors: dict[str, torch.Tensor] = {}
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            name = f"parameter {p} of group {g}"
            tensors[name] = parameter
            if parameter.grad is not None:
                tensors[f"the gradient of {name}"] = parameter.grad
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key} of {name}"] = value
    with torch.no_grad():
        different = _same_values(tensors)
    if different and dist.get_rank() == 0:
        log.warning("before the step of %s, %s differed between ranks; broadcast from rank 0",
                    type(optimizer).__name__, " and ".join(different))


def _same_values(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    compared = state_of(_SyncedTensors).compared
    fresh = {name: tensor for name, tensor in tensors.items() if _is_plain(tensor) and tensor not in compared}
    sums = [exact_sum(tensor) for tensor in fresh.values()]
    mine = {name: (tuple(tensor.shape), tensor.dtype, value)
            for (name, tensor), value in zip(fresh.items(), _to_host(sums), strict=True)}
    found = from_all_ranks(mine)
    for tensor in fresh.values():
        compared[tensor] = True
    common = [name for name in found[0] if all(name in other and other[name][:2] == found[0][name][:2] for other in found)]
    different = [name for name in common if any(other[name] != found[0][name] for other in found)]
    for name in different:
        value = fresh[name].detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(compat.as_transferable(value), src=0)
        fresh[name].detach().copy_(value)
    if not different:
        return []
    rank = next(r for r, other in enumerate(found) if other[different[0]] != found[0][different[0]])
    return [f"{len(different)} of {len(common)} parameters and buffers (first `{different[0]}`, on rank {rank})"]


def _is_plain(tensor: Any) -> bool:
    return (isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not compat.is_fake(tensor)
            and tensor.layout is torch.strided and tensor.device.type in ("cpu", device_type()) and tensor.numel() > 0)


def _to_host(values: list[torch.Tensor]) -> list[int]:
    """Copy values to the host, synchronizing once per device."""
    result: dict[int, int] = {}
    for device in {value.device for value in values}:
        places = [i for i, value in enumerate(values) if value.device == device]
        result.update(zip(places, torch.stack([values[i] for i in places]).tolist(), strict=True))
    return [result[i] for i in range(len(values))]


def _of_all_modules() -> dict[str, torch.Tensor]:
    """Parameters and buffers of all modules in the process whose names identify them on every rank."""
    gc.collect()  # a dead copy, on one rank perhaps, would have the same names
    modules = live_objects(nn.Module)
    below = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    found: list[tuple[str, torch.Tensor]] = []
    for root in modules:
        if id(root) not in below:
            kind = f"{type(root).__module__}.{type(root).__qualname__}"
            found.extend((f"{kind}.{name}", tensor) for name, tensor in [*root.named_parameters(), *root.named_buffers()])
    counts = Counter(name for name, _ in found)
    return {name: tensor for name, tensor in sorted(found, key=lambda item: item[0]) if counts[name] == 1}


def _same_generators() -> bool:
    """Broadcast rank 0's states of the CPU's and the current device's generators; returns whether they differed."""
    states = generator_states()
    found = from_all_ranks([bytes(state.numpy()) for state in states])
    if all(other == found[0] for other in found):
        return False
    torch.set_rng_state(torch.frombuffer(bytearray(found[0][0]), dtype=torch.uint8))
    if len(states) > 1:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(found[0][1]), dtype=torch.uint8))
    return True


def generator_states() -> list[torch.Tensor]:
    """RNG states of the CPU and, if it computes, of the current CUDA device; does not synchronize."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device_type() == "cuda" else [])]


@contextlib.contextmanager
def drawing_as(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context in which random numbers are drawn from these states of the generators; none: from the current ones."""
    if not states:
        yield
        return
    devices = [torch.cuda.current_device()] if len(states) > 1 else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[0])
        if devices:
            torch.cuda.set_rng_state(states[1])
        yield
