"""Optimizer steps on placed parameters: shard the state like the parameters, run elementwise optimizers on local tensors."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpml_compiler.runtime.consistency.initial_sync import sync_for_optimizer
from hpml_compiler.runtime.dtensor.local_dispatch import WITHOUT_PARTIAL, wrap
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, place_like
from hpml_compiler.runtime.optimizer.resident_memory import local
from hpml_compiler.runtime.placements.unsharded_params import invalidate
from hpml_compiler.runtime.watchdog.rank_status import Location, RankStatus
from passes import compat
from passes.session_state import state_of

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
"""Optimizers that update every element independently. (Derived classes are not included: they may do anything.)"""


def watch_optimizers() -> None:
    """Register hooks, until the session ends, that give every optimizer's state its parameters' placement before a step.

    Elementwise optimizers then step on local tensors: for 200 parameters, AdamW takes 6 ms instead of 24 ms.

    Dynamo does not trace optimizer steps, since it would trace through whole tensors: where a step is compiled, alone or as
    part of a function, it runs eagerly.
    """
    state_of(_PlacedSteps)


class _LocalSteps(WeakKeyDictionary[torch.optim.Optimizer, "_LocalStep"]):
    """Optimizers in a step on local tensors."""


class _PlacedSteps:
    """placed: by optimizer, the state that has its parameters' placements."""

    def __init__(self) -> None:
        self.spot = Location("optimizer.step")
        self.placed: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
        compat.untraced(torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step))  # one code for every class
        self.hooks = register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.compiler.disable(reason="hpml steps the optimizer on each rank's shards, which cannot be compiled; remove "
                               "fullgraph=True, or call step() outside of the compiled function")
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _after_step(optimizer, args, kwargs)  # in case the step before raised an error
    invalidate(parameter for group in optimizer.param_groups for parameter in group["params"])
    steps, status = state_of(_PlacedSteps), state_of(RankStatus)
    steps.spot.calls += 1
    status.at, status.inside = steps.spot, True
    if steps.placed.get(optimizer) is not optimizer.state:
        sync_for_optimizer(optimizer)
        place_state(optimizer)
        steps.placed[optimizer] = optimizer.state
    if not has_closure(args, kwargs) and works_on_locals(optimizer):
        state_of(_LocalSteps)[optimizer] = _LocalStep(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    state_of(RankStatus).inside = False
    step = state_of(_LocalSteps).pop(optimizer, None)
    if step is not None:
        step.undo(optimizer)


def forget_steps(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give optimizers that an error left in the middle of a step their placed parameters again."""
    for optimizer in optimizers:
        _after_step(optimizer, (), {})


def placed_groups(optimizer: torch.optim.Optimizer) -> list[list[Any]] | None:
    """The placed parameters by group while an optimizer's groups contain their local tensors; else None."""
    step = state_of(_LocalSteps).get(optimizer)
    return None if step is None else step.groups


def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard state tensors that have a placed parameter's shape like the parameter; others, such as step counts, stay.

    State is whole where it was created before the model was sharded, loaded from a checkpoint, or set by the script.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, PlacedTensor):
            _place(state, parameter)


def _place(state: dict[str, Any], parameter: DTensor) -> None:
    for key, value in state.items():
        if type(value) is torch.Tensor and value.dim() and value.shape == parameter.shape:
            state[key] = place_like(value, parameter)


def has_closure(args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if `optimizer.step` has a closure: it runs the model, so the parameters must stay in the groups."""
    return len(args) > 1 and args[1] is not None or kwargs.get("closure") is not None


def works_on_locals(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step on local tensors gives the same result: elementwise, and gradients placed like their parameters.

    False with hooks on the optimizer itself, since these read the parameters.
    """
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    if hooks or type(optimizer) not in ELEMENTWISE:
        return False
    with compat.plain_torch_functions():
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                return False
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and not _grad_fits(parameter):
                    return False
    return True


def _grad_fits(parameter: DTensor) -> bool:
    grad, spec = parameter.grad, parameter._spec
    if grad is None or isinstance(grad, DTensor) and grad._spec is spec:
        return True
    return (isinstance(grad, DTensor) and grad.device_mesh == parameter.device_mesh
            and grad.placements == parameter.placements
            and all(type(placement) in WITHOUT_PARTIAL for placement in grad.placements))


class _LocalStep:
    """Replaces the parameters and state of an optimizer by local tensors, until `undo`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state = optimizer.state
        self.groups = [group["params"] for group in optimizer.param_groups]
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        with compat.plain_torch_functions():
            for group in optimizer.param_groups:
                params = group["params"]
                group["params"] = [local(parameter) for parameter in params]
                for parameter, part in zip(params, group["params"], strict=True):
                    if part is not parameter and parameter.grad is not None:
                        part.grad = parameter.grad._local_tensor
                    if parameter in self.state:
                        if part is not parameter:
                            _place(self.state[parameter], parameter)
                        state[part] = {key: local(value) for key, value in self.state[parameter].items()}
        optimizer.state = state

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the parameters, and give new state tensors their placement."""
        locals_state, optimizer.state = optimizer.state, self.state
        with compat.plain_torch_functions():
            for group, params in zip(optimizer.param_groups, self.groups, strict=True):
                local_params, group["params"] = group["params"], params
                for parameter, part in zip(params, local_params, strict=True):
                    if part is not parameter:
                        part.grad = None
                    if part in locals_state:
                        _update(self.state[parameter], locals_state[part], parameter)


def _update(state: dict[str, Any], locals_state: dict[str, Any], parameter: Any) -> None:
    for key, value in locals_state.items():
        if local(state.get(key)) is value:
            continue
        is_part = isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.dim() > 0
        if is_part and value.shape == parameter._local_tensor.shape:
            value = wrap(value, PlacedTensor, parameter._spec)
        state[key] = value
