"""Error of a search in which nothing fits: what is short, how far the search came, and what would be enough."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpml_compiler.planner.graph.microbatching import few_of
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.errors import Infeasible


@dataclass(frozen=True)
class SearchRefusal:
    """known: the refusal with the least memory that is known to be enough, or the first. limit: bytes of a device. state_bytes:
    of parameters, gradients and optimizer state on all devices together. tried, unplanned: configurations that were planned or
    ruled out, and those that the time limit left. bound_us, least_bytes: no configuration takes, or needs on a device, less.
    mixed: operations at which rows depend on each other."""

    known: Infeasible
    limit: int
    devices: int
    state_bytes: float
    tried: int
    unplanned: int
    bound_us: float
    least_bytes: float
    mixed: Sequence[str] = ()

    def error(self) -> Infeasible:
        what, steps = [self.known.what], list[str]()
        if self.tried > 1:
            what.append(f"none of {self.tried} configurations of mesh, stages, microbatches and recomputation was found to "
                        f"fit, and none needs less than {format_bytes(self.least_bytes)}")
        if self.unplanned:
            what.append(f"time_limit was over before {self.unplanned} others were planned, of which none takes less than "
                        f"{format_us(self.bound_us)}")
            steps.append("raise time_limit")
        if self.state_bytes > self.devices * self.limit:
            own = format_bytes(self.state_bytes / self.devices)
            what.append(f"parameters, gradients and optimizer state take {own} on each device, even if all of them are sharded "
                        f"over all {self.devices}")
            steps.append(f"use at least {math.ceil(self.state_bytes / self.limit)} devices")
        if self.mixed:
            what.append(f"rows of the batch depend on each other at {few_of(self.mixed)}, so that there are no microbatches")
        error = Infeasible("; ".join(what), self.known.where, ", or ".join([*steps, self.known.next_step]))
        error.smallest_budget_bytes, error.plan = self.known.smallest_budget_bytes, self.known.plan
        return error
