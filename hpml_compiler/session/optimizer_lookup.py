"""The optimizer that holds a graph's parameters, found among what is there."""
from __future__ import annotations

import gc
from collections.abc import Collection, Sequence, Set

import torch

from hpml_compiler.options import OptimizerName

NAMES: dict[type, OptimizerName] = {
    torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd", torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}


def optimizer_of(parameters: Collection[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers that are there and hold any of these, those of a known name first. A look at every object of the process:
    for compiling, where that is done anyway, and not for a step."""
    wanted = {id(parameter) for parameter in parameters}
    found = _holding(wanted)
    if len(found) > 1:
        del found
        gc.collect()  # one that the script has dropped for another steps no more, however long it waits to be collected
        found = _holding(wanted)
    return sorted(found, key=lambda each: optimizer_name(each) is None)


def _holding(wanted: Set[int]) -> list[torch.optim.Optimizer]:
    made = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [each for each in made if any(id(p) in wanted for p in held_by([each]))]


def held_by(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Each once: a library's wrapper holds what the optimizer inside does."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def optimizer_name(optimizer: torch.optim.Optimizer) -> OptimizerName | None:
    """What the option `optimizer` calls it; None for one that it does not know."""
    found: OptimizerName | None = next((NAMES[kind] for kind in type(optimizer).__mro__ if kind in NAMES), None)
    if found == "sgd" and any(group["momentum"] for group in optimizer.param_groups):
        return "sgd_momentum"
    return found
