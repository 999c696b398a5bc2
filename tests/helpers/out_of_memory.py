"""Run out of memory in one half of a compiled graph, at one operator of it (with `compiler: "eager"`)."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpml_compiler.compile import single_device
from hpml_compiler.compile.lower import lowering
from passes import compat


class _Failing(TorchDispatchMode):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 1.00 GiB.")
        return func(*args, **(kwargs or {}))


class Failures:
    """armed: operators of the next call of `half` until it fails, one for each time that it fails."""

    def __init__(self) -> None:
        self.half, self.armed, self.failed = "", [], 0

    def arm(self, half: str, *numbers: int) -> None:
        self.half, self.armed = half, list(numbers)

    def around(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(function: Any) -> Any:
            inner = make(function)

            def call(arguments: list[Any]) -> Any:
                half = "forward" if compat.running_node() is None else "backward"
                if not self.armed or half != self.half:
                    return inner(arguments)
                try:
                    with _Failing(self.armed.pop(0)):
                        return inner(arguments)
                except torch.OutOfMemoryError:
                    self.failed += 1
                    raise

            return compat.mark_boxed(call)

        return made


@contextlib.contextmanager
def failures() -> Iterator[Failures]:
    """Failures of graphs that are compiled inside of this context."""
    found, before = Failures(), (lowering.boxed, lowering.interpreted, single_device.boxed)
    lowering.boxed = single_device.boxed = found.around(before[0])
    lowering.interpreted = found.around(before[1])
    try:
        yield found
    finally:
        lowering.boxed, lowering.interpreted, single_device.boxed = before
