"""Averages of replicas that train apart along a mesh axis: their parameters, after every so many optimizer steps.

LocalSGD (Stich, arXiv 1805.09767) takes the mean. DiLoCo (Douillard et al., arXiv 2311.08105) gives the outer optimizer, SGD
with Nesterov momentum, the difference between the parameters after the average before and the mean as their gradient. State of
the scripts' optimizers belongs to a replica and is never averaged.
"""
from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.optimizer.optimizer_step import placed_groups, watch_optimizers
from hpml_compiler.runtime.placements.unsharded_params import invalidate
from hpml_compiler.runtime.process.world_group import this_rank
from hpml_compiler.runtime.watchdog.rank_status import Location, RankStatus
from passes import compat
from passes.hardware.axis import Axes
from passes.hardware.gradient_compression import AVERAGE, steps_apart
from passes.session_state import state_of

log = logging.getLogger("hpml")

c10d = torch.ops._c10d_functional
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ReplicaAxis:
    """steps: between averages. lr, momentum: of the outer optimizer."""

    name: str
    size: int
    steps: int
    lr: float
    momentum: float

    @property
    def has_outer(self) -> bool:
        return (self.lr, self.momentum) != AVERAGE


@dataclass
class OuterState:
    """before: the parameter after the average before, this rank's part. momentum: of the outer optimizer."""

    before: torch.Tensor
    momentum: torch.Tensor


class WaitingState(Protocol):
    """State of a checkpoint for replicas that are not there yet."""

    def begin(self, mesh: DeviceMesh) -> None: ...

    def restore_optimizer(self, optimizer: torch.optim.Optimizer, placed: Sequence[Sequence[Any]]) -> None: ...


class ReplicaAverages:
    """along: by mesh, the axis of replicas. steps: of each optimizer, so far. outer: by parameter. restored: what a checkpoint
    has of replicas."""

    is_of_models = True

    def __init__(self) -> None:
        self.along: dict[DeviceMesh, ReplicaAxis] = {}
        self.steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.outer = WeakIdKeyDictionary()
        self.restored: WaitingState | None = None
        self.spot = Location("averaging replicas")

    def __bool__(self) -> bool:
        return bool(self.along)

    def forget(self) -> None:
        """Forget the steps so far and the outer optimizer's state, before other values are loaded."""
        self.steps.clear()
        self.outer.clear()
        self.restored = None

    def axis_of(self, tensor: Any) -> ReplicaAxis | None:
        return self.along.get(tensor.device_mesh) if isinstance(tensor, PlacedTensor) else None

    def outer_of(self, parameter: PlacedTensor) -> OuterState:
        """The outer optimizer's state of a parameter, as it is before the first step unless it was there already."""
        if parameter not in self.outer:
            before = parameter._local_tensor.detach().clone()
            self.outer[parameter] = OuterState(before, torch.zeros_like(before))
        return self.outer[parameter]


class _AveragesHook:
    def __init__(self) -> None:
        watch_optimizers()  # whose hook gives the optimizer its placed parameters again, before this one
        self.hooks = register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def train_apart(mesh: DeviceMesh, axes: Axes, outer: tuple[float, float]) -> None:
    """Average the parameters that are placed on a mesh along its axis of replicas, if it has one, from now on."""
    apart = next((axis for axis in axes if steps_apart(axis.compression)), None)
    if apart is None:
        return
    averages = state_of(ReplicaAverages)
    state_of(_AveragesHook)
    if mesh not in averages.along and this_rank() == 0:
        log.info("%d replicas along %s train apart and are averaged every %d optimizer steps: numbers differ from those of one "
                 "device", apart.size, apart.name, steps_apart(apart.compression))
    averages.along[mesh] = ReplicaAxis(apart.name, apart.size, steps_apart(apart.compression), *outer)
    if averages.restored is not None:
        averages.restored.begin(mesh)


@torch.compiler.disable(reason="hpml averages replicas around the step, outside of compiled code")
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    averages, groups = state_of(ReplicaAverages), _groups(optimizer)
    if averages.restored is not None:
        averages.restored.restore_optimizer(optimizer, groups)
    with compat.plain_torch_functions(), torch.no_grad():
        for parameter in _replicated(groups, averages):
            if averages.along[parameter.device_mesh].has_outer:
                averages.outer_of(parameter)


def _groups(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """The parameters as they are placed, also in the middle of a step."""
    return placed_groups(optimizer) or [group["params"] for group in optimizer.param_groups]


def _replicated(groups: list[list[Any]], averages: ReplicaAverages) -> list[PlacedTensor]:
    """The parameters that replicas have."""
    return [each for group in groups for each in group if averages.axis_of(each) is not None]


@torch.compiler.disable(reason="hpml averages replicas around the step, outside of compiled code")
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    averages = state_of(ReplicaAverages)
    parameters = _replicated(_groups(optimizer), averages)
    if not parameters:
        return
    count = averages.steps[optimizer] = averages.steps.get(optimizer, 0) + 1
    due = [each for each in parameters if count % averages.along[each.device_mesh].steps == 0]
    if not due:
        return
    status = state_of(RankStatus)
    averages.spot.calls += 1
    status.at, status.inside = averages.spot, True
    with compat.plain_torch_functions(), torch.no_grad():
        for mesh, axis in averages.along.items():
            for bucket in _buckets([each for each in due if each.device_mesh == mesh]):
                _average(bucket, averages, mesh.get_group(axis.name), axis)
    invalidate(due)
    status.inside = False


def _buckets(parameters: list[PlacedTensor]) -> Iterator[list[PlacedTensor]]:
    """Parameters of one dtype and device, that are averaged together."""
    by_kind: dict[Any, list[PlacedTensor]] = {}
    for each in parameters:
        by_kind.setdefault((each.dtype, each._local_tensor.device), []).append(each)
    for same in by_kind.values():
        bucket, filled = list[PlacedTensor](), 0
        for each in same:
            if bucket and filled + each._local_tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(each)
            filled += each._local_tensor.nbytes
        yield bucket


def _average(parameters: list[PlacedTensor], averages: ReplicaAverages, group: dist.ProcessGroup, axis: ReplicaAxis) -> None:
    flat = torch.cat([each._local_tensor.detach().reshape(-1) for each in parameters])
    flat = c10d.wait_tensor(c10d.all_reduce(flat, "sum", group.group_name)) / axis.size
    for parameter, part in zip(parameters, flat.split([each._local_tensor.numel() for each in parameters]), strict=True):
        local = parameter._local_tensor.detach()
        mean = part.view(local.shape)
        if not axis.has_outer:
            local.copy_(mean)
            continue
        state = averages.outer_of(parameter)
        difference = state.before - mean
        state.momentum.mul_(axis.momentum).add_(difference)
        state.before.sub_(difference.add_(state.momentum, alpha=axis.momentum), alpha=axis.lr)
        local.copy_(state.before)
