"""Parse bytes, watts and mesh sizes as people write them."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from passes.errors import shortened
from passes.hardware.cluster import MOST_DEVICES
from passes.hardware.gradient_compression import check_compression
from passes.hardware.mesh import BETWEEN

_UNITS = {"b": 1} | {f"{letter}{suffix}": base ** power
                     for power, letter in enumerate("kmgt", start=1) for suffix, base in (("b", 1000), ("ib", 1024))}


MOST_BYTES = 10**18


def parse_bytes(value: object) -> int:
    """Parse bytes from an int or a text such as "64MiB" (2**20), "24GB" (10**9) or "1.5 TiB". Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
        unit = _UNITS.get(match[2].lower() or "b") if match else None
        if match is None or unit is None:
            raise ValueError(f"{shortened(repr(value))} is not a number of bytes: write 64MiB (2**20), 24GB (10**9) or an "
                             "integer")
        exact = "." not in match[1] and len(match[1]) < 20
        size = int(match[1]) * unit if exact else int(min(float(match[1]) * unit, 2.0 * MOST_BYTES))
    if size < 1:
        raise ValueError(f"{shortened(str(value))!r} is less than one byte")
    if size > MOST_BYTES:
        raise ValueError("it is more than an exabyte")
    return size


def parse_budget(value: object) -> int | float:
    """Parse bytes, as `parse_bytes` does, or a fraction of a device's memory, such as 0.8 or "80%". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?\s*%|\d+\.\d+)\s*", value) if isinstance(value, str) else None
    if match:
        share = float(match[1].rstrip("% ")) / (100 if "%" in match[1] else 1)
    elif isinstance(value, float):
        share = value
    else:
        return parse_bytes(value)
    if not 0 < share <= 1:
        raise ValueError(f"{shortened(repr(value))} is neither a number of bytes nor a fraction of a device's memory "
                         "(above 0, at most 1): write 24GB, 0.8 or 80%")
    return share


def parse_watts(value: object) -> float:
    """Parse watts from a number or a text such as "300W" or "0.3 kW". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k?)w?\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if match:
        watts = float(match[1]) * (1000 if match[2] else 1)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        watts = float(min(value, 1e18))
    else:
        raise ValueError(f"{shortened(repr(value))} is not a power: write 300 or 300W")
    if not 0 < watts < 1e18:
        raise ValueError(f"{shortened(repr(value))} is not a positive, finite number of watts")
    return watts


def parse_axes(value: object) -> object:
    """Check mesh sizes by axis; returns anything but a mapping unchanged. Raises ValueError."""
    if not isinstance(value, Mapping):
        return value
    if not value:
        raise ValueError("it has no axis; leave it out to let the solver choose")
    for name, size in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of an axis: use letters, digits and underscores")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"the size of axis {name!r} is {size!r}, not a positive integer")
        if size > MOST_DEVICES:
            raise ValueError(f"the size of axis {name!r} is more than {MOST_DEVICES:,}, the most devices that hpml plans for")
    return dict(value)


_PLACES = {"pp": 0, "dp": 1, "tp": 3}  # 2: axes of other names
"""Outer axes first. Traffic along pp and dp is small or can wait, and may cross nodes; tp needs the fastest links."""


def parse_names(value: object) -> object:
    """Split a text such as "pp,dp,tp" into names; lists become tuples, other values are returned unchanged."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(","))
    return tuple(value) if isinstance(value, list) else value


def parse_recompute(value: object) -> object:
    """Values of recompute by pattern of block paths: "full" is {"*": "full"}, "auto" is {}; a text such as
    "layers.*=full,layers.0=none" is split. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    if "=" in value:
        pairs = (each.partition("=") for each in value.split(","))
        return {pattern.strip(): mode.strip() for pattern, _, mode in pairs}
    return {} if value == "auto" else {"*": value}


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in order."""
    low = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*low, *(number // k for k in low)})


def parse_compression(value: object) -> object:
    """Compressions of gradients by mesh axis: "bf16" is for axes between nodes; a text such as "dp=bf16" is split. Raises
    ValueError."""
    if isinstance(value, str):
        pairs = (each.partition("=") for each in value.split(",")) if "=" in value else [(BETWEEN, "=", value)]
        value = {axis.strip(): text.strip() for axis, _, text in pairs}
    if isinstance(value, Mapping):
        return {axis: check_compression(text) for axis, text in value.items()}
    return value


def parse_local_steps(value: object) -> object:
    """Steps between averages by mesh axis: 8 is for axes between nodes; a text such as "dp=8" is split. Raises ValueError."""
    if isinstance(value, str):
        pairs = (each.partition("=") for each in value.split(",")) if "=" in value else [(BETWEEN, "=", value)]
        value = {axis.strip(): int(text) if text.strip().isdecimal() else text for axis, _, text in pairs}
    elif not isinstance(value, Mapping):
        value = {BETWEEN: value}
    for steps in value.values():
        if type(steps) is not int or steps < 2:
            raise ValueError(f"{steps!r} is no number of optimizer steps between two averages: give a whole number from 2 "
                             'on, for the axis between nodes or by axis, such as {"dp": 8}')
    return dict(value)


def parse_speeds(value: object) -> object:
    """Relative speeds, such as [2, 1] or "2,1". Raises ValueError."""
    given = [float(each) for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(
            isinstance(each, (int, float)) and 0 < each < math.inf for each in given):
        raise ValueError(f"{shortened(repr(value))} are no speeds: give positive numbers, as in [2, 1]")
    return tuple(map(float, given))


def parse_outer_optimizer(value: object) -> object:
    """Learning rate and momentum of an outer optimizer: "average" is (1, 0), "nesterov" DiLoCo's (0.7, 0.9), and
    "nesterov:LR:MOMENTUM" others. Raises ValueError."""
    if value == "average":
        return 1.0, 0.0
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
        value = "nesterov:" + ":".join(map(str, value))
    match = re.fullmatch(r"nesterov(?::(\d+(?:\.\d+)?):(\d+(?:\.\d+)?))?", value) if isinstance(value, str) else None
    lr, momentum = (float(match[1] or 0.7), float(match[2] or 0.9)) if match else (0.0, 0.0)
    if not lr > 0 or not 0 <= momentum < 1:
        raise ValueError(f'{shortened(repr(value))} is no outer optimizer: write "average", "nesterov", or '
                         '"nesterov:LR:MOMENTUM", LR above 0 and MOMENTUM below 1, as in "nesterov:0.7:0.9"')
    return lr, momentum


def in_mesh_order(mesh: Mapping[str, int] | None, order: Sequence[str] | None) -> dict[str, int] | None:
    """Sort the axes of a mesh, outermost first: by `order` if given, else pp, dp, axes of other names as given, tp.

    Raises ValueError where `order` does not name each axis once.
    """
    if order is not None and sorted(order) != sorted(mesh or {}):
        raise ValueError(f"mesh_order names {', '.join(order) or 'no axis'}, but the axes of the mesh are "
                         f"{', '.join(mesh or {}) or 'left to the solver'}: name each axis of the mesh once")
    if mesh is None:
        return None
    names = order or sorted(mesh, key=lambda name: _PLACES.get(name, 2))
    return {name: mesh[name] for name in names}


def parse_rows(value: object) -> object:
    """Numbers of rows by axis, with tuples for lists; a text such as "dp=5+3" is split. Other values are returned unchanged."""
    if isinstance(value, str) and "=" in value:
        pairs = (each.partition("=") for each in value.split(","))
        value = {axis.strip(): [int(row) if row.strip().isdigit() else row for row in rows.split("+")]
                 for axis, _, rows in pairs}
    if not isinstance(value, Mapping):
        return value
    for axis, rows in value.items():
        if not isinstance(rows, (list, tuple)) or not rows or any(type(row) is not int or row < 1 for row in rows):
            raise ValueError(f"the rows of axis {axis!r} are {rows!r}: give a positive number of rows for each rank along it, "
                             'such as {"dp": [5, 3]}')
    return {axis: tuple(rows) for axis, rows in value.items()}


def parse_chunks(value: object) -> object:
    """A number of chunks, or "auto". Raises ValueError."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("give 'auto' or a whole number from 1 on")
    return value
