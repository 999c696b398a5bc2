"""Clocks with cheap marks, whose differences can be read later."""
from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    def mark(self) -> Any:
        """Mark the current time."""
        ...

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time between two marks in µs."""
        ...


class HostClock:
    """Host clock, for devices that run synchronously."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed_us(self, start: int, end: int) -> float:
        return (end - start) / 1e3


class CudaClock:
    """Clock of the current CUDA stream: marks are events, which are only synchronized when the time between two is read."""

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
