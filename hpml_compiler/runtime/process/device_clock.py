"""Clocks with cheap marks, whose differences can be read later."""
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hpml_compiler.runtime.process.compute_device import device_type


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
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def clock_for(device_type: str) -> Clock:
    return CudaClock() if device_type == "cuda" else HostClock()


class Waits:
    """Notes the waits for other ranks in the call that is measured now, if any. noted: start and end of each; None if none
    is measured."""

    def __init__(self) -> None:
        self.clock = clock_for(device_type())
        self.noted: list[tuple[Any, Any]] | None = None

    def begins(self) -> Any:
        return None if self.noted is None else self.clock.mark()

    def ends(self, start: Any) -> None:
        if self.noted is not None and start is not None:
            self.noted.append((start, self.clock.mark()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = self.begins()
        yield
        self.ends(start)
