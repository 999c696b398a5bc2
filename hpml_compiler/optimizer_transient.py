"""Temporary memory of an optimizer step, by optimizer and its settings."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpml_compiler.options import OptimizerName, Options

AT_ONCE: dict[OptimizerName, int] = {"adamw": 1, "adam": 1, "sgd": 0, "sgd_momentum": 0, "rmsprop": 1, "adagrad": 2}
ONE_BY_ONE: dict[OptimizerName, int] = {"adamw": 3, "adam": 3, "sgd": 0, "sgd_momentum": 0, "rmsprop": 2, "adagrad": 2}
"""Temporary tensors of a parameter's size in an optimizer step: for all parameters at once, or for one parameter after another,
including those left from the previous parameter."""
COPY_IN_PLACE_OF_ANOTHER: frozenset[OptimizerName] = frozenset({"adam", "adamw", "adagrad"})
"""Optimizers in which a copy of all gradients needs no extra memory: it is freed before another temporary is allocated, or is
used as that temporary."""


@dataclass(frozen=True)
class OptimizerTransient:
    """Temporary tensors of an optimizer step, each of a parameter's size: at_once for all parameters, one_by_one for one
    parameter after another, of which the largest counts. remedy: advice to reduce it."""

    at_once: int
    one_by_one: int
    remedy: str = ""

    def bytes_of(self, all_bytes: float, largest: float) -> float:
        return self.at_once * all_bytes + self.one_by_one * largest


def transient_of(options: Options, device_type: str, groups: Sequence[Mapping[str, Any]] = ({},)) -> OptimizerTransient:
    """Temporary tensors of the optimizer that the options name. groups: its parameter groups with their settings, if known;
    otherwise torch's defaults hold."""
    found = max((_of_group(options.optimizer_name, device_type, group) for group in groups),
                key=lambda each: (each.at_once, each.one_by_one))
    if not options.offloads("optimizer"):
        return found
    # An offloaded optimizer steps over one part at a time, of the size of the largest parameter, with its state.
    return OptimizerTransient(0, max(found.at_once, found.one_by_one) + options.optimizer_states, found.remedy)


def _of_group(name: OptimizerName, device_type: str, group: Mapping[str, Any]) -> OptimizerTransient:
    if group.get("fused"):
        return OptimizerTransient(0, 0)
    added = group.get("weight_decay") and name != "adamw" and not group.get("decoupled_weight_decay")
    copies = int(bool(added or group.get("maximize")))  # of the gradients
    foreach = group.get("foreach")
    if foreach is None:
        foreach = device_type != "cpu"
    if foreach:
        at_once = AT_ONCE[name] + (0 if name in COPY_IN_PLACE_OF_ANOTHER else copies)
        return OptimizerTransient(at_once, 0, "construct the optimizer with foreach=False or fused=True" if at_once else "")
    return OptimizerTransient(0, ONE_BY_ONE[name] + copies + bool(group.get("nesterov")), "")
