"""Format numbers, placements and meshes as text."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpml_compiler.plans.schema import CollectiveTotal


def format_us(time_us: float) -> str:
    """Microseconds as text of about three digits: 12.3 us, 4.56 ms, 7.89 s."""
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if time_us >= scale:
            return f"{_digits(time_us / scale)} {unit}"
    return f"{_digits(time_us)} us"


def format_joules(energy_j: float) -> str:
    """Joules as text of about three digits: 12.3 mJ, 4.56 J, 7.89 kJ."""
    for unit, scale in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)):
        if energy_j >= scale:
            return f"{_digits(energy_j / scale)} {unit}"
    return f"{_digits(energy_j * 1e6)} uJ"


def format_objective(value: float, objective: str) -> str:
    """Value of an objective as text: µs as a time, or the µJ of one device as an energy."""
    return format_us(value) if objective == "time" else f"{format_joules(value * 1e-6)} a device"


def format_bytes(size: float) -> str:
    """Bytes as text with binary units: 512 B, 1.5 MiB, 80 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{_digits(size / 1024**power)} {unit}"
    return f"{size:.0f} B"


def format_count(number: int) -> str:
    """A count as text: 512, 12.6 k, 8.03 G."""
    for scale, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{_digits(number / scale)} {unit}"
    return str(number)


def format_mesh(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"


def format_place(mesh: Mapping[str, int], devices: int, cluster: str | None) -> str:
    """The mesh of a plan and its devices, such as "mesh dp=2 x tp=4: 8 devices of 1x8:h100-80g"."""
    place = f"mesh {format_mesh(mesh)}: {devices} devices" if devices > 1 else "one device"
    return f"{place} of {cluster}" if cluster else place


def shorten(name: str, width: int) -> str:
    """A dotted name in at most `width` characters: leading parts, then leading characters, become an ellipsis."""
    if len(name) <= width:
        return name
    parts = name.split(".")
    for start in range(1, len(parts)):
        short = "…" + ".".join(parts[start:])
        if len(short) <= width:
            return short
    return "…" + name[-max(width - 1, 1):]


def format_placements(placements: Sequence[str], mesh: Mapping[str, int]) -> str:
    """Placements as "dp S(0), tp P", without the axes that a value is replicated on; "R" if it is replicated on all."""
    split = [f"{axis} {each}" for axis, each in zip(mesh, placements, strict=False) if each != "R"]
    return ", ".join(split) or "R"


def format_collectives(totals: Mapping[str, CollectiveTotal]) -> str:
    return ", ".join(f"{kind} x{total.count} ({format_bytes(total.bytes)})" for kind, total in totals.items())


def describe_placements(placements: Sequence[str], mesh: Mapping[str, int]) -> list[str]:
    """A sentence for each axis, such as "tp=4: dim 1 is sharded, one part of 4 on each device"."""
    return [f"{axis}={size}: {_describe(each, size)}" for (axis, size), each
            in zip(mesh.items(), placements, strict=False)]


def _describe(placement: str, size: int) -> str:
    if placement == "R":
        return "replicated on each device"
    if placement in ("P", "M"):
        return f"partial: the value is the {'sum' if placement == 'P' else 'maximum'} over the devices"
    dim, factor = re.findall(r"\d+", f"{placement}.0")[:2]
    part = f"factor {factor} of dim {dim}" if "." in placement else f"dim {dim}"
    return f"{part} is sharded into {size} parts, one per device"


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
