"""Number of rows of the batch for each coordinate of a mesh axis: as even as possible, or in given proportions."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from passes.hardware.axis import Axes, Axis, AxisKind
from passes.hardware.gradient_compression import steps_apart

WEIGHTS_ALONE = ("tp",)
"""Axes that never split the batch."""


def apportioned(rows: int, weights: Sequence[int]) -> tuple[int, ...]:
    """`rows` in proportion to the weights, by largest remainder: exact where the sum of the weights divides them. For equal
    weights they are as even as possible, the first with one more."""
    total = sum(weights)
    counts = [rows * weight // total for weight in weights]
    first = sorted(range(len(weights)), key=lambda k: (-(rows * weights[k] % total), k))
    for k in first[:rows - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


def with_rows(axes: Axes, rows: int, weights: Mapping[str, Sequence[int]], microbatches: int = 1) -> Axes:
    """The axes, with the rows by coordinate where these are unequal. weights: of an axis, 1 for each coordinate by default.
    microbatches: that the rows of every coordinate divide into.

    An axis with more coordinates than rows of a microbatch has none: then the batch is not split along it.
    """
    each = rows // microbatches
    return tuple(_with_rows(axis, each, weights.get(axis.name, (1,) * axis.size), microbatches) for axis in axes)


def _with_rows(axis: Axis, rows: int, weights: Sequence[int], times: int) -> Axis:
    if axis.kind is AxisKind.TIME or axis.name in WEIGHTS_ALONE or axis.size == 1 or steps_apart(axis.compression):
        return axis
    counts = apportioned(rows, weights)
    return axis if min(counts) == 0 or len({*counts}) == 1 else replace(axis, rows=tuple(times * each for each in counts))
