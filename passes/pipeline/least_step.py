"""Lower bounds of a pipelined step over all cuts of a chain of layers into stages.

Before rank r starts, its first microbatch goes forward through all stages before its own, and after its last backward, one
goes back through them: r is idle meanwhile. So a schedule takes at least head(r) + work(r), where head(r) is the time of a
microbatch in the stages before r. Where backward is split, gradients of weights run while a microbatch goes back, and only
forward counts.
"""
from __future__ import annotations

import math

STEPS = 60
"""Bisections: as many as a double has digits."""


def least_step_us(work_us: float, through_us: float, stages: int, microbatches: int, waited: float = 1.0) -> float:
    """No cut into so many stages, one on each rank, takes less. work_us: of all stages for all microbatches. through_us: the
    part of it that may be cut anywhere, and that a microbatch goes through in order; waited: the share of that part for which
    later ranks wait."""
    low, high = work_us / stages, work_us + through_us
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _allows(middle, work_us, through_us, stages, waited / microbatches) else (middle, high)
    return low


def least_of_layers_us(layers_us: float, layers: int, ranks: int) -> float:
    """Some rank has at least the rounded-up share of equal layers, which take layers_us together."""
    return layers_us * math.ceil(layers / ranks) / layers if layers else 0.0


def _allows(us: float, work_us: float, through_us: float, stages: int, head: float) -> bool:
    """True if some cut may be so fast. head: share of the work before a rank that is its idle time. Later stages take as much
    as they may, which leaves the least idle time to all."""
    before_us, room_us = through_us, 0.0
    for _ in range(stages):
        free_us = us - head * before_us
        if free_us < 0.0:
            return False
        before_us -= before_us if head >= 1.0 else min(free_us / (1.0 - head), before_us)
        room_us += us - head * before_us
    return before_us <= 1e-9 * through_us and room_us >= work_us
