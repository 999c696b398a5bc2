"""Collectives of a step, counted by torch's profiler."""
from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable

import torch

from hpml_compiler.monitor.profiled_step import SETTLE_S

STEPS = 3


def collectives_of(step: Callable[[], object]) -> Counter[str]:
    """Calls of functional collectives, by name.

    torch's profiler fails where a thread of gloo still writes its events when it stops. All ranks must run the same, so each
    profiles three steps, of which one succeeds.
    """
    found: list[Counter[str]] = []
    for _ in range(STEPS):
        with contextlib.suppress(MemoryError), torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
            time.sleep(SETTLE_S)
        if profile.profiler is not None and profile.profiler.kineto_results is not None:
            raw = profile.profiler.kineto_results.events()  # `key_averages` makes objects of all events: seconds
            names = (event.name() for event in raw)
            found.append(Counter(name.split("::")[1] for name in names if "c10d_functional" in name))
    return found[0]
