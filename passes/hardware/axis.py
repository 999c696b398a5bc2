"""Axes as layouts are over them: what lies along each, and how many. What they cost is a mesh's to say (`MeshAxis`)."""
from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class AxisKind(enum.Enum):
    """What lies along an axis. Along devices, a change of placement is a collective of theirs, or a slice. Along time lie the
    microbatches of a step, one after another: what is whole is there before their loop or after it, a change is taking rows for
    it, or collecting what it made."""

    DEVICES = "devices"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    size: int
    kind: AxisKind = AxisKind.DEVICES


def time_axis(microbatches: int) -> Axis:
    return Axis("time", microbatches, AxisKind.TIME)


Axes = tuple[Axis, ...]
"""Those of a layout, in order: one placement on each."""


def device_axes(sizes: Mapping[str, int]) -> Axes:
    """Axes of devices, as a plan or a pin names them: `{"dp": 2, "tp": 4}`."""
    return tuple(Axis(name, size) for name, size in sizes.items())
