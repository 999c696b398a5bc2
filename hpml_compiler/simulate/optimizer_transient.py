"""What an optimizer makes during its step, by its name and how it is set."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpml_compiler.options import OptimizerName, Options

AT_ONCE: dict[OptimizerName, int] = {"adamw": 1, "adam": 1, "sgd": 0, "sgd_momentum": 0, "rmsprop": 1, "adagrad": 2}
ONE_BY_ONE: dict[OptimizerName, int] = {"adamw": 3, "adam": 3, "sgd": 0, "sgd_momentum": 0, "rmsprop": 2, "adagrad": 2}
"""Tensors of a parameter's size that a step makes and drops: of all parameters together, or of one after another, with what
is still there of the one before."""
COPY_IN_PLACE_OF_ANOTHER: frozenset[OptimizerName] = frozenset({"adam", "adamw", "adagrad"})
"""Where a copy of all gradients takes the place of something else: it goes before that is made, or serves for it."""


@dataclass(frozen=True)
class OptimizerTransient:
    """Tensors of a parameter's size that an optimizer makes during its step: at_once for all parameters, one_by_one for one
    after another, of which the largest counts. remedy: what makes it need less."""

    at_once: int
    one_by_one: int
    remedy: str = ""

    def bytes_of(self, all_bytes: float, largest: float) -> float:
        return self.at_once * all_bytes + self.one_by_one * largest


def transient_of(options: Options, device_type: str, groups: Sequence[Mapping[str, Any]] = ({},)) -> OptimizerTransient:
    """Of the optimizer that the options name. groups: its parameter groups, with their settings, where they are known; else as
    torch sets one of that name."""
    found = max((_of_group(options.optimizer_name, device_type, group) for group in groups),
                key=lambda each: (each.at_once, each.one_by_one))
    if not options.offloads("optimizer"):
        return found
    # A part at a time, of the size of the largest, with its state.
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
        return OptimizerTransient(at_once, 0, "give it foreach=False or fused=True" if at_once else "")
    return OptimizerTransient(0, ONE_BY_ONE[name] + copies + bool(group.get("nesterov")), "")
