"""State of replicas in checkpoints: their own parameters and optimizer state beside the means, and the outer optimizer's state.

`replicas/<name>` has the values of all replicas of a tensor, stacked along a first dim; the tensor itself is their mean, which
runs with another number of replicas continue from. `replicas/outer/<parameter>` is state of the outer optimizer.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, place_like
from hpml_compiler.runtime.optimizer.replica_averages import OuterState, ReplicaAverages
from hpml_compiler.runtime.optimizer.resident_memory import local
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank, is_owner
from hpml_compiler.runtime.placements.unsharded_params import invalidate
from passes import compat
from passes.graph.fx_nodes import memory_of
from passes.session_state import state_of

OUTER, BEFORE, MOMENTUM = "outer/", ".before", ".momentum"


def replica_tensors(tensors: Mapping[str, torch.Tensor], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer],
                    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that a checkpoint has besides, or in place of, these, and the number of replicas and steps as JSON. All ranks
    must call it. Without replicas there are none."""
    averages = state_of(ReplicaAverages)
    restored = averages.restored if isinstance(averages.restored, RestoredReplicas) else None
    waiting = {} if restored is None else restored.tensors
    found = {f"replicas/{name}": each for name, each in waiting.items()}
    if not averages:
        return found, {"sizes": restored.sizes, "steps": restored.steps} if restored is not None and waiting else {}
    means: dict[Any, PlacedTensor] = {}
    with compat.plain_torch_functions(), torch.no_grad():
        for name, tensor in tensors.items():
            axis = averages.axis_of(tensor) if name.startswith(("model/", "optimizer")) else None
            if axis is None or not isinstance(tensor, PlacedTensor):
                continue
            found[f"replicas/{name}"] = waiting[name] if name in waiting else _stacked(tensor, axis.name, axis.size)
            key = memory_of(tensor._local_tensor)
            if key is None or key not in means:  # tied parameters are saved once
                mean = tensor._local_tensor.detach().clone()
                dist.all_reduce(mean, group=tensor.device_mesh.get_group(axis.name))
                means[key] = compat.make_dtensor(PlacedTensor, mean / axis.size, tensor._spec)
            found[name] = means[key]
        for name, parameter in _named(model):
            if parameter in averages.outer and isinstance(parameter, PlacedTensor):
                state = averages.outer[parameter]
                for end, part in ((BEFORE, state.before), (MOMENTUM, state.momentum)):
                    found[f"replicas/{OUTER}{name}{end}"] = compat.make_dtensor(PlacedTensor, part, parameter._spec)
    sizes = {axis.size for axis in averages.along.values()}
    return found, {"sizes": sorted(sizes), "steps": [averages.steps.get(each, 0) for each in optimizers]}


def _stacked(tensor: PlacedTensor, axis: str, size: int) -> PlacedTensor:
    """This rank's part of the replicas' values as one tensor, in the same memory."""
    mesh = tensor.device_mesh
    placements = [Shard(0) if name == axis else _one_dim_on(placement)
                  for name, placement in zip(mesh.mesh_dim_names or (), tensor.placements, strict=True)]
    with compat.plain_torch_functions():
        like = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device="meta")
        spec = compat.dtensor_spec(mesh, placements, like)
        part = tensor._local_tensor.detach()[None]
        return compat.make_dtensor(PlacedTensor, part if is_owner(mesh, placements) else part[:0], spec)


def _one_dim_on(placement: Placement) -> Placement:
    if isinstance(placement, InnerShard):
        return InnerShard(placement.dim + 1, placement.outer)
    if isinstance(placement, Shard):
        return Shard(placement.dim + 1)
    return placement if isinstance(placement, SingleRank) else Replicate()


@dataclass
class RestoredReplicas:
    """Values of a checkpoint that replicas begin with, once parameters are placed and optimizers have their state.

    names: of the parameters of each optimizer's groups. folders: by optimizer, the first part of the names of its state.
    tensors: values of all replicas, by name. sizes: numbers of replicas of the run that saved. steps: of each optimizer in it.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    names: Sequence[Sequence[Sequence[str]]]
    folders: Sequence[str]
    tensors: dict[str, torch.Tensor]
    sizes: Sequence[int]
    steps: Sequence[int]

    def begin(self, mesh: DeviceMesh) -> None:
        """Give parameters that are placed on a mesh now the values of this rank's replica, and optimizers their counts."""
        averages = state_of(ReplicaAverages)
        axis = averages.along[mesh]
        if list(self.sizes) != [axis.size]:
            self.tensors.clear()  # the means, which are loaded already, are of any number of replicas
            return
        for optimizer, steps in zip(self.optimizers, self.steps, strict=True):
            averages.steps.setdefault(optimizer, steps)
        with compat.plain_torch_functions(), torch.no_grad():
            for name, parameter in _named(self.model):
                if averages.axis_of(parameter) is not axis or not isinstance(parameter, PlacedTensor):
                    continue
                own = self.tensors.pop(f"model/{name}", None)
                if own is not None:
                    parameter._local_tensor.copy_(_part_of(own[mesh.get_local_rank(axis.name)], parameter))
                    invalidate([parameter])
                before, momentum = (self.tensors.pop(f"{OUTER}{name}{end}", None) for end in (BEFORE, MOMENTUM))
                if before is not None and momentum is not None:
                    averages.outer[parameter] = OuterState(_part_of(before, parameter), _part_of(momentum, parameter))

    def restore_optimizer(self, optimizer: torch.optim.Optimizer, placed: Sequence[Sequence[Any]]) -> None:
        """Give an optimizer, before its step, the state of this rank's replica. placed: its parameters by group."""
        number = next((k for k, each in enumerate(self.optimizers) if each is optimizer), None)
        if number is None or not self.tensors:
            return
        averages = state_of(ReplicaAverages)
        with compat.plain_torch_functions(), torch.no_grad():
            for group, parameters, names in zip(optimizer.param_groups, placed, self.names[number], strict=True):
                for mine, parameter, name in zip(group["params"], parameters, names, strict=True):
                    axis = averages.axis_of(parameter)
                    for key, value in optimizer.state.get(mine, {}).items() if axis is not None else ():
                        own = self.tensors.pop(f"{self.folders[number]}/{name}.{key}", None)
                        if own is not None and axis is not None:
                            local(value).copy_(_part_of(own[parameter.device_mesh.get_local_rank(axis.name)], parameter))


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that checkpoints have."""
    return ((name.replace("_orig_mod.", ""), each) for name, each in model.named_parameters(remove_duplicate=False))


def _part_of(whole: torch.Tensor, parameter: PlacedTensor) -> torch.Tensor:
    """This rank's part of a tensor that is placed like a parameter, in memory of its own."""
    return local(place_like(whole, parameter)).to(parameter._local_tensor.device, copy=True)
