"""Average power of a run's devices, from the energy counters that this process can read."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpml_compiler.energy.meters import Counter, find_counter
from hpml_compiler.planner.graph.measured_costs import local_ranks
from hpml_compiler.runtime.process.compute_device import ranks_on_this_device

log = logging.getLogger("hpml")


class PowerMeter:
    """Average power since `begin` of all devices of the run, assuming that devices without a counter draw as much.

    counter: None if there is none. share: fraction of the run's devices that the counter covers.
    """

    def __init__(self, counter: Counter | None, share: float = 1.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counter, self.share, self.clock = counter, share, clock
        self._began: tuple[float, float] | None = None

    @staticmethod
    def here(device_type: str) -> PowerMeter:
        """Meter of this rank's GPU, or of this host's CPU packages, which its ranks share."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        where: dict[str, Any] = {}
        if device_type == "cuda":
            where["gpus"] = [f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"]
        return PowerMeter(find_counter(device_type, **where),
                          (ranks_on_this_device() if device_type == "cuda" else local_ranks()) / world)

    @property
    def label(self) -> str:
        """How power is measured; "" without a meter."""
        if self.counter is None:
            return ""
        return self.counter.label if self.share == 1.0 else f"{self.counter.label} on {self.share:.0%} of the devices"

    def begin(self) -> None:
        joules = self._joules()
        self._began = None if joules is None else (self.clock(), joules)

    def watts(self) -> float | None:
        """Average power since `begin` in watts; None without a meter, before `begin`, or if the meter fails."""
        joules, began = self._joules(), self._began
        if joules is None or began is None:
            return None
        elapsed = self.clock() - began[0]
        return (joules - began[1]) / elapsed / self.share if elapsed > 0 else None

    def _joules(self) -> float | None:
        if self.counter is None:
            return None
        try:
            return self.counter.joules()
        except (OSError, ValueError) as error:
            log.warning("the energy counter stopped answering: %s", error)
            self.counter = None
            return None
