"""Plain parameters in the place of placed ones: the inverse of `parameter_sharding`, for another process group."""
from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.install.parameter_sharding import finish_replacements
from hpml_compiler.runtime.install.swap_parameters import rebind_all
from hpml_compiler.runtime.optimizer.optimizer_step import forget_steps
from passes import compat

OWN = ("_local_tensor", "_spec", "_is_param")
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def is_whole(tensor: torch.Tensor) -> bool:
    """True if this rank has all of a tensor."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def make_plain(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Replace the placed parameters and buffers of a model, and the state of its optimizers, by plain tensors, without
    communication. Gradients are dropped.

    Objects of the script that refer to a parameter refer to the plain one afterwards; local variables of running functions keep
    the placed one, whose values can no longer be read. Returns True if all values are kept, in the same memory; False if
    this rank has but a part of one: parameters and buffers that were sharded have arbitrary values then, and the optimizers no
    state.
    """
    finish_replacements()
    forget_steps(optimizers)
    with compat.plain_torch_functions(), torch.no_grad():
        olds = _placed(model)
        whole = all(map(is_whole, olds)) and all(map(is_whole, _state_tensors(optimizers)))
        news = [_plain(old) for old in olds]
        for optimizer in optimizers:
            if not whole:
                optimizer.state.clear()
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value._local_tensor if isinstance(value, DTensor) else value
        for parameter in model.parameters():
            parameter.grad = None
        _replace(olds, news)
        while olds:
            old: Any = olds.pop()
            old._local_tensor = torch.empty_like(old._local_tensor, device="meta")  # a stale value is not read unnoticed
    return whole


def _placed(model: nn.Module) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers()]
    return [each for each in found if isinstance(each, DTensor)]


def _state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _plain(old: Any) -> torch.Tensor:
    """The plain form of a placed tensor, with its attributes and hooks."""
    part = old._local_tensor
    value = part.detach() if is_whole(old) else part.new_empty_strided(old.shape, old.stride())
    if not isinstance(old, nn.Parameter):
        return value
    new: Any = nn.Parameter(value, old.requires_grad)
    new.__dict__.update((name, each) for name, each in old.__dict__.items() if name not in OWN)
    for hooks in HOOKS:
        if getattr(old, hooks) is not None:
            setattr(new, hooks, getattr(old, hooks))
    return new


def _replace(olds: list[torch.Tensor], news: Sequence[torch.Tensor]) -> None:
    gc.collect()  # graphs of the step that was interrupted
    rebind_all(olds, news)
