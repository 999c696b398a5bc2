"""Find the optimizer of a graph's parameters among the live objects of the process."""
from __future__ import annotations

import gc
from collections.abc import Collection, Sequence, Set

import torch

from hpml_compiler.options import OptimizerName
from hpml_compiler.runtime.process.live_objects import live_objects

NAMES: dict[type, OptimizerName] = {
    torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd", torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}


def optimizer_of(parameters: Collection[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Live optimizers that have any of these parameters, those with a known name first. This scans every object of the process:
    call it while compiling, never in a step."""
    wanted = {id(parameter) for parameter in parameters}
    found = _holding(wanted)
    if len(found) > 1:
        del found
        gc.collect()  # an optimizer that the script has replaced is garbage, but may not be collected yet
        found = _holding(wanted)
    return sorted(found, key=lambda each: optimizer_name(each) is None)


def _holding(wanted: Set[int]) -> list[torch.optim.Optimizer]:
    return [each for each in live_objects(torch.optim.Optimizer) if any(id(p) in wanted for p in held_by([each]))]


def held_by(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Parameters of these optimizers, each once: a library's wrapper has the same ones as the optimizer that it wraps."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def optimizer_name(optimizer: torch.optim.Optimizer) -> OptimizerName | None:
    """Value of the option `optimizer` for this optimizer; None if there is none."""
    found: OptimizerName | None = next((NAMES[kind] for kind in type(optimizer).__mro__ if kind in NAMES), None)
    if found == "sgd" and any(group["momentum"] for group in optimizer.param_groups):
        return "sgd_momentum"
    return found
