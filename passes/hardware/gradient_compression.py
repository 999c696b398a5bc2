"""Compression of gradients on their way along a mesh axis: fewer bytes, at the cost of rounded or approximated sums.

    "bf16", "fp16"    each rank's addends are rounded, summed in the gradient's own dtype, and the sum is rounded again
    "powersgd:RANK"   a matrix is summed as a product of two thin ones (Vogels et al., arXiv 1905.13727)
    "local:STEPS"     no gradients are sent, parameters are averaged every so many steps (the option local_steps)

A reduction to shards (ZeRO) rounds the addends alone. PowerSGD needs whole sums: reductions to shards, vectors, and matrices
that it does not at least halve are not compressed.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from passes.errors import BadInput
from passes.hardware.axis import Axes
from passes.hardware.mesh import BETWEEN, BOTH, Mesh, links_of_axes

NARROW = {"bf16": "bfloat16", "fp16": "float16"}
"""Short names of the dtypes that gradients are rounded to."""
EVERY = "*"
"""In place of an axis: all axes. BETWEEN: those whose groups cross nodes."""
AVERAGE = (1.0, 0.0)
"""Learning rate and momentum of the outer optimizer after "local:STEPS" that takes the mean, and has no state."""
LEAST_GAIN = 2
"""PowerSGD leaves matrices alone that have less than so many times the elements of their two factors."""


def check_compression(text: object) -> str:
    """The text of a compression. Raises ValueError."""
    if isinstance(text, str) and (text in NARROW or re.fullmatch(r"powersgd:[1-9]\d{0,3}", text)):
        return text
    raise ValueError(f'{text!r} is no compression of gradients: write "bf16", "fp16" or "powersgd:RANK", such as "powersgd:4"')


def rank_of(compression: str) -> int:
    """Rank of PowerSGD; 0 for anything else."""
    return int(compression.removeprefix("powersgd:")) if compression.startswith("powersgd:") else 0


def local(steps: int) -> str:
    """The compression by which replicas train apart for so many steps."""
    return f"local:{steps}"


def steps_apart(compression: str) -> int:
    """Steps for which replicas train apart; 0 where gradients are reduced."""
    return int(compression.removeprefix("local:")) if compression.startswith("local:") else 0


def describe_compression(compression: str) -> str:
    if steps := steps_apart(compression):
        return f"parameters averaged every {steps} steps, no gradients"
    rank = rank_of(compression)
    return f"gradients by PowerSGD of rank {rank}" if rank else f"gradients in {compression}"


def compresses(compression: str, kind: str, shape: Sequence[int], dtype: str) -> bool:
    """True if a reduction, by the collective `kind`, of a gradient of this local shape and dtype is compressed."""
    if steps_apart(compression):
        return kind == "all_reduce"
    if dtype not in ("float32", "float64"):
        return False
    if compression in NARROW:
        return True
    if kind != "all_reduce" or len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rank_of(compression), rows, columns) * (rows + columns) * LEAST_GAIN <= rows * columns


def sent_share(compression: str, kind: str, shape: Sequence[int], dtype: str) -> float:
    """Fraction of the bytes of such a gradient that are sent."""
    if not compression or not compresses(compression, kind, shape, dtype):
        return 1.0
    if steps := steps_apart(compression):
        return 1.0 / steps
    if compression in NARROW:
        return 2.0 / {"float32": 4, "float64": 8}[dtype]
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rank_of(compression), rows, columns) * (rows + columns) / (rows * columns)


def compressed_axes(mesh: Mesh, wanted: Mapping[str, str], devices_per_node: int) -> Axes:
    """The axes of a mesh for layouts, with the compression wanted by name, by BETWEEN or by EVERY. Raises BadInput for a name
    that is no axis."""
    if unknown := sorted(set(wanted) - {*mesh.names, EVERY, BETWEEN}):
        raise BadInput(f"{unknown[0]!r} is no axis of the mesh {mesh}", "options['compress']",
                       f'pin a mesh with this axis, such as "mesh": {{"{unknown[0]}": {mesh.size}}}, or write "compress": '
                       f'"{wanted[unknown[0]]}" for the axes between nodes')
    links = links_of_axes(dict(zip(mesh.names, mesh.shape)), devices_per_node)

    def of(name: str) -> str:
        found = [wanted.get(name), wanted.get(EVERY), wanted.get(BETWEEN) if links.get(name) in (BETWEEN, BOTH) else None]
        return next((each for each in found if each and steps_apart(each)), None) or next(filter(None, found), "")

    return tuple(replace(axis, compression=of(axis.name)) for axis in mesh.layout_axes)
