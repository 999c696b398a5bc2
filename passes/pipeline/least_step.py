"""Lower bounds of a pipelined step over all cuts of a chain of layers into stages.

Before rank r starts, its first microbatch goes forward through all stages before its own, and after its last backward, one
goes back through them: r is idle meanwhile. So a schedule takes at least head(r) + work(r), where head(r) is the time of a
microbatch in the stages before r. Where backward is split, gradients of weights run while a microbatch goes back, and only
forward counts.

With several stages on a rank, the same holds for the work of its stages from any one of them on. A weighted mean of these
bounds is one, too, and the least part of it that a unit of work has, wherever it is, bounds all cuts.

Where equal layers are cut evenly (`passes.solver.balanced_partition`), each stage takes at least as long as the rounded-down
share of the layers, whatever is around them: a stage with less would take a layer from one that is slower by more than a layer.
So ranks wait longer than in the best cut of all. What comes after the last layer, such as a head and its loss, is not divided
either: a rank has it besides whole layers.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

STEPS = 60
"""Bisections: as many as a double has digits."""


def least_step_us(work_us: float, through_us: float, stages: int, microbatches: int, waited: float = 1.0) -> float:
    """No cut into so many stages, one on each rank, takes less. work_us: of all stages for all microbatches. through_us: the
    part of it that may be cut anywhere, and that a microbatch goes through in order; waited: the share of that part for which
    later ranks wait."""
    low, high = work_us / stages, work_us + through_us
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        fits = _allows(middle, work_us, through_us, stages, waited / microbatches)
        low, high = (low, middle) if fits else (middle, high)
    return low


def least_even_us(work_us: float, stages_us: Sequence[float], waits_us: Sequence[float], ranks: int, microbatches: int,
                  ) -> float:
    """No step takes less whose stages, one after another over the ranks, take at least stages_us for all microbatches, and
    work_us together. waits_us: the part of these for which later ranks wait, which is their idle time at the first of them."""
    idle_us = list(accumulate((us / microbatches for us in waits_us[: ranks - 1]), initial=0.0))
    slowest_us = max(idle + sum(stages_us[rank::ranks]) for rank, idle in enumerate(idle_us))
    return max(slowest_us, (work_us + sum(idle_us)) / ranks)


def least_interleaved_us(work_us: float, through_us: float, ranks: int, microbatches: int, virtual: int) -> float:
    """The same over all cuts, where backward is not split."""
    own = _weights(ranks, microbatches, virtual)
    total, before, parts = sum(map(sum, own)), 0.0, list[float]()
    for chunk in range(virtual):
        for rank in range(ranks):
            before += own[chunk][rank]
            parts.append(microbatches * sum(own[c][rank] for c in range(chunk + 1)) + total - before)
    more_us = (work_us - through_us) * min(own[0])
    return max(work_us / ranks, (through_us * min(parts) / microbatches + more_us) / total)


def _weights(ranks: int, microbatches: int, virtual: int) -> list[list[float]]:
    """Weights of the bounds of all stages under which a unit of work counts the same in each of them, as far as none is
    negative."""
    m, found = max(microbatches, 2), [[1.0]]
    held = [0.0] * ranks  # weights of a rank's stages so far
    for chunk in range(virtual):
        if chunk:
            found.append([max(m * (held[-1] - held[0]) / (m - 1), 0.0)])
        last = held[0] + found[-1][0]
        for rank in range(1, ranks):
            found[-1].append(max(m * (last - held[rank]) / (m - 1), 0.0))
            last = held[rank] + found[-1][-1]
        held = [before + weight for before, weight in zip(held, found[-1], strict=True)]
    return found


def least_of_layers_us(layers_us: float, layers: int, ranks: int) -> float:
    """Some rank has at least the rounded-up share of equal layers, which take layers_us together."""
    return layers_us * math.ceil(layers / ranks) / layers if layers else 0.0


def least_with_end_us(layers: int, layer_us: float, inner_us: float, end_us: float, ranks: int, idle_us: float,
                      waited_us: float) -> float:
    """Whole layers over ranks, of which the last one also has end_us, take no less. layer_us: of a layer; inner_us: of each
    further one on the same rank. idle_us: the last rank is idle for as long, and for waited_us for each layer of others."""
    def own_us(count: int) -> float:
        return layer_us + (count - 1) * inner_us if count else 0.0

    return min(max(own_us(count) + end_us + max(idle_us, (layers - count) * waited_us),
                   own_us(math.ceil((layers - count) / (ranks - 1)))) for count in range(layers + 1))


def _allows(us: float, work_us: float, through_us: float, stages: int, head: float) -> bool:
    """True if some cut may be so fast. head: share of the work before a rank that is its idle time. Later stages take as much
    as they may, which leaves the least idle time to all."""
    before_us, room_us = through_us, 0.0
    for _ in range(stages):
        free_us = us - head * before_us
        if free_us < 0.0:
            return False
        before_us -= min(before_us, math.inf if head >= 1.0 else free_us / (1.0 - head))
        room_us += us - head * before_us
    return before_us <= 1e-9 * through_us and room_us >= work_us
