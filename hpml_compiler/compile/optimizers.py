"""The optimizer that holds a graph's parameters: which one it is, and what it makes during its step."""
from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hpml_compiler.options import OptimizerName

NAMES: dict[type, OptimizerName] = {
    torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd", torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}

AT_ONCE: dict[OptimizerName, int] = {"adamw": 1, "adam": 1, "sgd": 0, "sgd_momentum": 0, "rmsprop": 1, "adagrad": 2}
ONE_BY_ONE: dict[OptimizerName, int] = {"adamw": 3, "adam": 3, "sgd": 0, "sgd_momentum": 0, "rmsprop": 2, "adagrad": 2}
"""Tensors of a parameter's size that a step makes and drops: of all parameters together, or of one after another, with what
is still there of the one before."""
COPY_IN_PLACE_OF_ANOTHER: frozenset[OptimizerName] = frozenset({"adam", "adamw", "adagrad"})
"""Where a copy of all gradients takes the place of something else: it goes before that is made, or serves for it."""


@dataclass(frozen=True)
class Making:
    """Tensors of a parameter's size that an optimizer makes during its step: at_once for all parameters, one_by_one for one
    after another, of which the largest counts. remedy: what makes it need less."""

    at_once: int
    one_by_one: int
    remedy: str = ""

    def bytes_of(self, all_bytes: float, largest: float) -> float:
        return self.at_once * all_bytes + self.one_by_one * largest


def holding(parameters: Collection[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers that are there and hold any of these, those of a known name first. A look at every object of the process:
    for compiling, where that is done anyway, and not for a step."""
    wanted = {id(parameter) for parameter in parameters}
    made = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    found = [each for each in made if any(id(p) in wanted for p in held_by([each]))]
    return sorted(found, key=lambda each: name_of(each) is None)


def held_by(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Each once: a library's wrapper holds what the optimizer inside does."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def name_of(optimizer: torch.optim.Optimizer) -> OptimizerName | None:
    """What the option `optimizer` calls it; None for one that it does not know."""
    found: OptimizerName | None = next((NAMES[kind] for kind in type(optimizer).__mro__ if kind in NAMES), None)
    if found == "sgd" and any(group["momentum"] for group in optimizer.param_groups):
        return "sgd_momentum"
    return found


def making(name: OptimizerName, device_type: str, optimizer: torch.optim.Optimizer | None = None) -> Making:
    """What one makes during its step: as it is set where it is known, else as torch sets one of that name."""
    groups = [{}] if optimizer is None else optimizer.param_groups
    return max((_of_group(name, device_type, group) for group in groups), key=lambda each: (each.at_once, each.one_by_one))


def _of_group(name: OptimizerName, device_type: str, group: dict) -> Making:
    if group.get("fused"):
        return Making(0, 0)
    added = group.get("weight_decay") and name != "adamw" and not group.get("decoupled_weight_decay")
    copies = int(bool(added or group.get("maximize")))  # of the gradients
    foreach = group.get("foreach")
    if foreach is None:
        foreach = device_type != "cpu"
    if foreach:
        at_once = AT_ONCE[name] + (0 if name in COPY_IN_PLACE_OF_ANOTHER else copies)
        return Making(at_once, 0, "give it foreach=False or fused=True" if at_once else "")
    return Making(0, ONE_BY_ONE[name] + copies + bool(group.get("nesterov")), "")
