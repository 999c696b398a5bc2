"""Axes for tests in which names mean nothing."""
from __future__ import annotations

from passes.hardware.axis import Axes, Axis
from passes.hardware.mesh import AXIS_NAMES


def axes_of(*sizes: int) -> Axes:
    """Axes of devices of these sizes, x, y, ..., which are free to be used for anything."""
    return tuple(map(Axis, AXIS_NAMES, sizes))
