"""The grid of a placed tensor: which device has which part."""
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.op_rules.base import parse_placement


@dataclass(frozen=True)
class DeviceGrid:
    """dims: (dim, factor, number of parts) of each dim or factor that is split, in order. parts: devices by the part's number
    in each of these. axes: for each of these, the mesh axes that split it, outermost first. partial: devices have summands."""

    dims: tuple[tuple[int, int, int], ...]
    axes: tuple[tuple[str, ...], ...]
    parts: dict[tuple[int, ...], tuple[int, ...]]
    partial: bool

    @property
    def copies(self) -> int:
        return len(next(iter(self.parts.values()), ()))


def device_grid(placements: Sequence[str], mesh: Mapping[str, int]) -> DeviceGrid:
    """Devices are numbered with the first axis outermost; of several axes on one dim, the first splits first."""
    places = [parse_placement(each) for each in placements] or ["R"] * len(mesh)
    split: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        if isinstance(place, tuple):
            split[place].append(number)
    keys, sizes, names = sorted(split), list(mesh.values()), list(mesh)
    parts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, at in enumerate(itertools.product(*map(range, sizes))):
        part = []
        for key in keys:
            index = 0
            for number in split[key]:
                index = index * sizes[number] + at[number]
            part.append(index)
        parts[tuple(part)].append(device)
    counts = []
    for key in keys:
        count = 1
        for number in split[key]:
            count *= sizes[number]
        counts.append((*key, count))
    return DeviceGrid(tuple(counts), tuple(tuple(names[number] for number in split[key]) for key in keys),
                      {part: tuple(own) for part, own in sorted(parts.items())}, "P" in places or "M" in places)


def ranges(devices: Sequence[int]) -> str:
    """Devices as "0-7" or "0, 8, 16, 24"; very many by their first and their number."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1][1:] = [device]
        else:
            runs.append([device])
    texts = ["-".join(map(str, run)) for run in runs]
    return ", ".join(texts) if len(texts) <= 4 else f"{', '.join(texts[:3])}, ... ({len(devices)} devices)"
