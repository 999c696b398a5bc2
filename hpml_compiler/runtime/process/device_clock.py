"""Clocks: marks that are cheap to take, and the time between them, which may be asked for much later."""
from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    def mark(self) -> Any:
        """Now."""
        ...

    def elapsed_us(self, start: Any, end: Any) -> float:
        """From one mark to another."""
        ...


class HostClock:
    """Time of this process, for devices that have done their work when a call returns."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed_us(self, start: int, end: int) -> float:
        return (end - start) / 1e3


class CudaClock:
    """Time on the current CUDA stream, whose work runs behind: an event is recorded, and nobody waits for it until the
    time between two of them is asked for."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def clock_for(device_type: str) -> Clock:
    return CudaClock() if device_type == "cuda" else HostClock()
