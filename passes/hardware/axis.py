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
    """compression: of gradients that are reduced along the axis (`passes.hardware.gradient_compression`); "" is none."""

    name: str
    size: int
    kind: AxisKind = AxisKind.DEVICES
    compression: str = ""


def time_axis(microbatches: int) -> Axis:
    return Axis("time", microbatches, AxisKind.TIME)


Axes = tuple[Axis, ...]
"""Axes of a layout, in order: one placement on each."""


def device_axes(sizes: Mapping[str, int]) -> Axes:
    """Device axes, as a plan or a pin names them: `{"dp": 2, "tp": 4}`."""
    return tuple(Axis(name, size) for name, size in sizes.items())
