"""Axes of layouts: kind and size. Their costs are in a mesh (`MeshAxis`)."""
from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class AxisKind(enum.Enum):
    """Kind of an axis. Along devices, a change of placement is a collective, or a slice. Along time are the
    microbatches of a step: whole values are computed before or after their loop, and a change is slicing rows for
    it, or accumulating its results."""

    DEVICES = "devices"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Axis:
    """compression: of gradients that are reduced along the axis (`passes.hardware.gradient_compression`); "" is none. rows: of
    the batch, by coordinate along the axis, where they are unequal. Dims that stem from the batch are split in proportion to
    them, all others evenly."""

    name: str
    size: int
    kind: AxisKind = AxisKind.DEVICES
    compression: str = ""
    rows: tuple[int, ...] = ()

    def parts(self, size: int, of_batch: bool) -> tuple[int, ...]:
        """The sizes of the parts of a dim, by coordinate; () if it cannot be split like this."""
        if not self.rows or not of_batch:
            return () if size % self.size else (size // self.size,) * self.size
        total = sum(self.rows)
        return tuple(size * each // total for each in self.rows) if all(size * each % total == 0 for each in self.rows) else ()

    def part(self, size: int, of_batch: bool, coordinate: int | None = None) -> int:
        """The size of one part of a dim that can be split; by default of the largest."""
        if not self.rows or not of_batch:
            return size // self.size
        return size * (max(self.rows) if coordinate is None else self.rows[coordinate]) // sum(self.rows)

    def share(self, of_batch: bool = True) -> float:
        """Fraction of a split dim in the largest part."""
        return max(self.rows) / sum(self.rows) if self.rows and of_batch else 1 / self.size

    @property
    def fullest(self) -> int:
        """The first coordinate with most rows."""
        return self.rows.index(max(self.rows)) if self.rows else 0


def time_axis(microbatches: int) -> Axis:
    return Axis("time", microbatches, AxisKind.TIME)


Axes = tuple[Axis, ...]
"""Axes of a layout, in order: one placement on each."""


def fullest_rank(axes: Axes) -> tuple[int, ...]:
    """Coordinates of the first rank with most rows."""
    return tuple(axis.fullest for axis in axes)


def device_axes(sizes: Mapping[str, int]) -> Axes:
    """Device axes, as a plan or a pin names them: `{"dp": 2, "tp": 4}`."""
    return tuple(Axis(name, size) for name, size in sizes.items())
