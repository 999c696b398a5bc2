"""Optimizer state offload: state is stored outside device memory between steps, and a step updates a part at a time.

On a CPU the state is in memory-mapped files, where the optimizer's own code reads and writes it; state dicts contain
tensors as before. On a GPU it is in pinned host memory and is copied to the GPU part by part during the step; the
kernels are the same, so losses do not change.

A part is a run of parameters with no more bytes than the largest parameter. New state that a step creates (before it is
moved) and the step's temporaries take the memory of one part.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpml_compiler.runtime.optimizer.optimizer_step import ELEMENTWISE, has_closure, placed_groups
from hpml_compiler.runtime.optimizer.resident_memory import local
from passes import compat
from passes.errors import BadInput
from passes.session_state import state_of
from passes.transforms.memory.offload_storage import is_offload_storage, moved

WHERE = "options['offload']"
LEAST_BYTES = 4096
"""Smaller tensors, such as step counts, stay where they are."""

_MARK = "hpml_state_folder"


def offload_state(parameters: Iterable[torch.Tensor], folder: str) -> None:
    """Mark parameters whose optimizer state is offloaded to `folder`; needs `watch_steps`. Raises BadInput on several GPUs."""
    for parameter in parameters:
        if _moves(parameter) and dist.is_initialized() and dist.get_world_size() > 1:
            raise BadInput("offloading optimizer state is not supported on several GPUs yet", WHERE,
                           "do not offload the optimizer")
        setattr(parameter, _MARK, folder)  # a placed parameter that replaces it copies its attributes


def watch_steps() -> None:
    """Register the optimizer hooks, until the session ends. To be called after all other hooks are registered, since the
    pre-hook runs the step."""
    state_of(_OffloadedSteps)


class SteppedInParts(WeakSet[torch.optim.Optimizer]):
    """Optimizers that step a part at a time though their state stays where it is; needs `watch_steps`."""


class _OffloadedSteps:
    """stepped: by optimizer that is in a step, its parameters without gradients meanwhile, and the gradients."""

    def __init__(self) -> None:
        self.stepped: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Any, Any]]] = WeakKeyDictionary()
        self.hooks = register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.compiler.disable(reason="hpml steps an optimizer part by part, which cannot be compiled; remove fullgraph=True, or "
                               "call step() outside of the compiled function")
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _after_step(optimizer, args, kwargs)  # in case the step before raised an error
    with compat.plain_torch_functions():
        folders = _folders(optimizer)
        if folders and (why := why_not_in_parts(optimizer, args, kwargs)):
            raise BadInput(f"offloading optimizer state steps a part of the parameters at a time, but {why}", WHERE,
                           "do not offload the optimizer, or use one of " + ", ".join(sorted(x.__name__ for x in ELEMENTWISE)))
        if folders or optimizer in state_of(SteppedInParts):
            state_of(_OffloadedSteps).stepped[optimizer] = _step(optimizer, folders)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with compat.plain_torch_functions():
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for parameter, gradient in state_of(_OffloadedSteps).stepped.pop(optimizer, ()):
            if id(parameter) in held and parameter.grad is None:
                parameter.grad = gradient


def _folders(optimizer: torch.optim.Optimizer) -> dict[Any, str]:
    """Parameter as the optimizer has it (possibly the local part) -> folder, for parameters with offloaded state."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    placed = placed_groups(optimizer)
    marked = stepped if placed is None else [p for params in placed for p in params]
    found = zip(stepped, (getattr(p, _MARK, None) for p in marked), strict=True)
    return {parameter: folder for parameter, folder in found if folder is not None}


def why_not_in_parts(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> str:
    """Reason why a step cannot be made for a part of the parameters at a time; "" if it can."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        return f"{kind.__module__}.{kind.__qualname__} may combine all parameters"
    if has_closure(args, kwargs):
        return "a step with a closure runs the model in between"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has step hooks, which expect one step of all parameters"
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return "its step is differentiable or capturable, so it keeps the tensors that it reads"
    return ""


def _step(optimizer: torch.optim.Optimizer, folders: dict[Any, str]) -> list[tuple[Any, Any]]:
    """Step all parameters. Returns (parameter, gradient) for those with gradients, and sets their `.grad` to None so that
    torch's own step does nothing."""
    raw_step = compat.step_without_hooks(type(optimizer))
    groups = [group["params"] for group in optimizer.param_groups]
    for parameter, folder in folders.items():
        _put_away(optimizer.state.get(parameter, {}), parameter, folder)  # state from before offloading, or from a state dict
    stepped: list[tuple[Any, Any]] = []
    try:
        for part in _parts(groups):
            for k, group in enumerate(optimizer.param_groups):
                group["params"] = [parameter for number, parameter in part if number == k]
            there = {parameter: _bring(optimizer.state[parameter], parameter) for _, parameter in part
                     if parameter in optimizer.state}
            raw_step(optimizer)
            for _, parameter in part:
                state = optimizer.state.get(parameter, {})
                _return(state, there.get(parameter, {}))
                if parameter in folders:
                    _put_away(state, parameter, folders[parameter])
            stepped += [(parameter, parameter.grad) for _, parameter in part]
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
    for parameter, _ in stepped:
        parameter.grad = None
    return stepped


def _parts(groups: list[list[Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Parameters with gradients in parts of bounded size, each with the index of its param group."""
    todo = [(k, parameter) for k, params in enumerate(groups) for parameter in params if parameter.grad is not None]
    most = max((_nbytes(parameter) for _, parameter in todo), default=0)
    part: list[tuple[int, Any]] = []
    nbytes = 0
    for k, parameter in todo:
        if part and nbytes + _nbytes(parameter) > most:
            yield part
            part, nbytes = [], 0
        part.append((k, parameter))
        nbytes += _nbytes(parameter)
    if part:
        yield part


def _nbytes(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * local(tensor).element_size()


def _moves(parameter: torch.Tensor) -> bool:
    """True if offloaded state must be copied to the device for the step."""
    return local(parameter).is_cuda


def _put_away(state: dict[str, Any], parameter: Any, folder: str) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not is_offload_storage(local(value)) and _nbytes(value) >= LEAST_BYTES:
            there = moved(local(value), folder)
            if _moves(parameter):
                state[key] = there
            else:  # the same tensor object, now in another storage
                local(value).set_(there.untyped_storage(), 0, there.shape, there.stride())


def _bring(state: dict[str, Any], parameter: Any) -> dict[str, torch.Tensor]:
    """Replace offloaded state by copies on the parameter's device. Returns the offloaded tensors by name."""
    away = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and is_offload_storage(value)
            } if _moves(parameter) else {}
    state.update((key, value.to(parameter.device, non_blocking=True, copy=True)) for key, value in away.items())
    return away


def _return(state: dict[str, Any], away: dict[str, torch.Tensor]) -> None:
    for key, there in away.items():
        there.copy_(state[key])
        state[key] = there
