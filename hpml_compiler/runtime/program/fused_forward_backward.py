"""Microbatched step whose loss is inside the graph: forward runs forward and backward, and backward returns the gradients.

Gradients are linear in the loss's tangent: forward uses the tangent of the previous backward, and backward scales the gradients
to the one that arrives. In three cases that is not enough, and backward reruns the step with all tangents that have arrived:
low-precision gradients, whose range depends on the loss scale; gradients at other outputs than the loss; and a backward that is
not linear, as one that clips gradients.
"""
from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.runtime.process.world_group import control_group, world_size
from hpml_compiler.runtime.program.microbatch_loop import MicrobatchLoop, Values, in_order, numbers_first, numbers_last
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger("hpml")
FEW_BITS_LOST = 4.0
"""Largest factor by which low-precision gradients may be scaled up: the smallest of them are rounded more coarsely by it. They
are not scaled down but recomputed: they may have overflowed."""


@dataclass(frozen=True)
class RerunState:
    """State for rerunning a step. names: the graph's inputs, without `numbers`, which are the same at every call; written:
    those that are mutated after forward; uses_rng: whether the step draws random numbers; device: on which. narrow: whether it
    has low-precision numbers. linear: whether gradients are linear in the loss's tangent. full_loop: makes a loop that takes
    gradients at all outputs; None where that is not possible."""

    names: tuple[str, ...]
    numbers: Mapping[str, Any]
    written: frozenset[str]
    uses_rng: bool
    device: torch.device
    narrow: bool
    linear: bool
    full_loop: Callable[[], MicrobatchLoop] | None = None

    def keep(self, values: Mapping[str, Any]) -> list[Any]:
        """Values to save until backward: inputs, and RNG states."""
        kept = [values[name].clone() if name in self.written else values[name] for name in self.names]
        return kept + (random_states(self.device) if self.uses_rng else [])

    @contextlib.contextmanager
    def drawing(self, kept: Sequence[Any]) -> Iterator[Values]:
        """Yields the inputs; random numbers drawn inside are those of forward."""
        count = len(self.names)
        devices = [self.device] if self.uses_rng and self.device.type == "cuda" else []
        with torch.random.fork_rng(devices) if self.uses_rng else contextlib.nullcontext():
            if self.uses_rng:
                torch.set_rng_state(kept[count])
            if devices:
                torch.cuda.set_rng_state(kept[count + 1], self.device)
            yield {**dict(zip(self.names, kept[:count], strict=True)), **self.numbers}


def _on_any_rank(here: bool) -> bool:
    """Logical or over the ranks: of a gradient that arrives sharded, the parts of some may be zero."""
    if world_size() == 1:
        return here
    found = torch.tensor(here, dtype=torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=control_group())
    return bool(found)


def random_states(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class FusedForwardBackward:
    """forward returns the graph's forward outputs, its gradients, the tangent that these were computed with, and the values
    that a rerun would take. Where a rerun is certain, gradients are empty and the tangent is NaN. saved: examples of
    all these. `loss` is the name of the loss's tangent; at the other tangents, no gradient is expected."""

    def __init__(self, schedule: MicrobatchLoop, forward_outputs: int, loss: str, saved: Sequence[Any],
                 again: RerunState | None):
        self.schedule, self.forward_outputs, self.loss, self.rerun = schedule, forward_outputs, loss, again
        self.as_taken = numbers_first(range(len(saved)), saved)
        self.like, self.last = saved, 1.0
        self.gradients = sum(name is not None for name in schedule.loop.results[forward_outputs:])
        self.dtype, self.device = saved[self.gradients].dtype, saved[self.gradients].device
        self.known = again is None or not again.narrow
        """Guess that the next tangent equals the last one: not for low-precision numbers before the first backward."""
        self.others = False
        self.full_loop: MicrobatchLoop | None = None

    def forward(self, arguments: list[Any]) -> list[Any]:
        loop = self.schedule.loop
        names = [name for name in loop.inputs if not name.startswith("tangents")]
        values = dict(zip(names, arguments, strict=True))
        arguments.clear()
        kept = [] if self.rerun is None else self.rerun.keep(values)
        if self.known and not self.others:
            values[self.loss] = used = torch.full((), self.last, dtype=self.dtype, device=self.device)
            self.schedule.at_once(values)
            gradients = [x for x in self.schedule.results(values, loop.results[self.forward_outputs:]) if x is not None]
        else:
            self.schedule.all_forward(values, saves=False)
            used = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
            gradients = [used.new_empty(0, dtype=x.dtype, device=x.device) for x in self.like[:self.gradients]]
        results = self.schedule.results(values, loop.results[:self.forward_outputs])
        return [*results, *numbers_last([*gradients, used, *kept], self.like)]

    def backward(self, arguments: list[Any]) -> list[Any]:
        saved = in_order(self.as_taken, arguments)
        tangents = [name for name in self.schedule.loop.inputs if name.startswith("tangents")]
        given = dict(zip(tangents, arguments[len(saved):], strict=True))
        arguments.clear()
        used, gradients, kept = saved[self.gradients], saved[:self.gradients], saved[self.gradients + 1:]
        saved.clear()
        value, before = float(given[self.loss]), float(used)
        if value != 0.0 and math.isfinite(value):
            self.last, self.known = value, True
        schedule = self.schedule
        others = len(tangents) > 1 and _on_any_rank(any(bool(given[name].any()) for name in tangents if name != self.loss))
        if others:
            schedule = self._whole()
        if others or self._anew(value, before):
            return self._repeated(schedule, kept, given)
        if value != before:
            gradients = [(x.to(torch.promote_types(x.dtype, torch.float32)) * (value / before)).to(x.dtype)
                         if x.is_floating_point() or x.is_complex() else x for x in gradients]
        elif compat.keeps_graph():  # backward may run again, and `.grad` may be changed in place until then
            gradients = [x.clone() for x in gradients]
        remaining = iter(gradients)
        return [None if name is None else next(remaining) for name in self.schedule.loop.results[self.forward_outputs:]]

    def _anew(self, value: float, before: float) -> bool:
        """True if the step must be rerun, since the gradients of forward are missing or cannot be scaled."""
        if self.rerun is None or value == before:
            return False
        if math.isnan(before) or not self.rerun.linear:
            return True
        return self.rerun.narrow and not 1 <= value / before <= FEW_BITS_LOST

    def _whole(self) -> MicrobatchLoop:
        if self.full_loop is None:
            if self.rerun is None or self.rerun.full_loop is None:
                raise HpmlError(
                    "backward has a gradient for another output than the loss, which was compiled without one",
                    "backward",
                    "compute all of the loss in the compiled model or none of it, or remove options['microbatches']")
            self.full_loop = self.rerun.full_loop()
            log.warning("backward has a gradient for another output than the loss: from now on, microbatches recompute forward "
                        "in backward; to avoid this, compute all of the loss in the compiled model, or none of it")
        self.others = True
        return self.full_loop

    def _repeated(self, schedule: MicrobatchLoop, kept: Sequence[Any], given: Mapping[str, Any]) -> list[Any]:
        """Rerun the step with the tangents that have arrived."""
        assert self.rerun is not None, "its inputs were saved"
        with self.rerun.drawing(kept) as values:
            values.update(given)
            schedule.at_once(values)
        return schedule.results(values, schedule.loop.results[self.forward_outputs:])
