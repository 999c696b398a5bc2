"""Check before an optimizer steps that its memory is there; if not, step a part of the parameters at a time.

A step that fails half-way has changed some state and cannot be repeated. So the memory that it will need is allocated, and
freed, before anything is changed: on a GPU it then lies in torch's cache. Steps in parts give the same numbers.
"""
from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpml_compiler.optimizer_transient import transient_of
from hpml_compiler.options import OPTIMIZER_STATES, Options
from hpml_compiler.runtime.optimizer.optimizer_offload import SteppedInParts, offload_state, watch_steps, why_not_in_parts
from hpml_compiler.runtime.optimizer.optimizer_step import placed_groups
from hpml_compiler.runtime.optimizer.resident_memory import local
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.out_of_memory import StepTooLarge, free_memory, mapped_files_count, memory_failure
from hpml_compiler.runtime.process.world_group import world_size
from hpml_compiler.session.optimizer_lookup import optimizer_name
from hpml_compiler.visualize.formatting import format_bytes
from passes import compat
from passes.session_state import state_of

log = logging.getLogger("hpml")


def watch_room(options: Options) -> None:
    """Register the check, until the session ends; after all hooks but those that step in parts."""
    state_of(_Room).options = options
    watch_steps()


class _Room:
    def __init__(self) -> None:
        self.options = Options.parse(None)
        self.hook = register_optimizer_step_pre_hook(_before_step)

    def close(self) -> None:
        self.hook.remove()


@torch.compiler.disable(reason="hpml checks the memory of an optimizer step, which cannot be compiled; call step() outside of "
                               "the compiled function")
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with compat.plain_torch_functions():
        if optimizer in state_of(SteppedInParts):
            return
        state, at_once, in_parts, offloaded = _needs(optimizer, state_of(_Room).options)
        if fits(state + at_once):
            return
        free_memory()
        if fits(state + at_once):
            return
        needs = format_bytes(state + at_once)
        why = why_not_in_parts(optimizer, args, kwargs)
        offloads = not fits(state + in_parts)
        if not why and offloads and device_type() == "cuda" and world_size() > 1:
            why = "its state has to be offloaded, which several GPUs do not support yet"
        if not why and offloads and not fits(offloaded):
            why = f"with its state offloaded, it still needs {format_bytes(offloaded)}"
        if why:
            raise StepTooLarge(f"the optimizer's step needs {needs} more, which this device does not have, and cannot be made "
                               f"in parts: {why}; nothing was changed", type(optimizer).__name__,
                               "use fewer rows or more devices")
        if offloads:
            placed = placed_groups(optimizer) or [group["params"] for group in optimizer.param_groups]
            offload_state((p for params in placed for p in params), state_of(_Room).options.offload_folder or "")
        state_of(SteppedInParts).add(optimizer)
        log.warning("the optimizer's step needs %s more, which this device does not have: from now on it steps a part of the "
                    "parameters at a time%s; nothing is lost", needs, ", with its state offloaded" if offloads else "")


def fits(nbytes: float) -> bool:
    """True if this many bytes can be allocated now."""
    try:
        torch.empty(int(nbytes), dtype=torch.uint8, device=device_type())
    except Exception as error:
        if not memory_failure(error):
            raise
        return False
    return True


def _needs(optimizer: torch.optim.Optimizer, options: Options) -> tuple[float, float, float, float]:
    """Bytes of new state, and of temporary tensors: of a step at once, and of one in parts; and of a part with its state, which
    is offloaded after it, to files that may count, too."""
    name = optimizer_name(optimizer) or "adamw"
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    sizes = [float(p.numel() * p.element_size()) for p in map(local, stepped)]
    new = sum(size for p, size in zip(stepped, sizes, strict=True) if not optimizer.state.get(p))
    transient = transient_of(options.model_copy(update={"optimizer": name, "offload": "off"}), device_type(),
                             optimizer.param_groups)
    total, largest = sum(sizes), max(sizes, default=0.0)
    in_parts, states = transient.bytes_of(largest, largest), OPTIMIZER_STATES[name]
    mapped = states * new if mapped_files_count() else 0.0
    return states * new, transient.bytes_of(total, largest), in_parts, in_parts + states * largest + mapped
