"""Compression of gradients on their way along a mesh axis: fewer bytes, at the cost of rounded sums.

"bf16" and "fp16": each rank rounds its addends; they are summed in the dtype of the gradient, and the sum is rounded again. A
reduction to shards (ZeRO) rounds the addends alone.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from passes.errors import BadInput
from passes.hardware.axis import Axes
from passes.hardware.mesh import BETWEEN, BOTH, Mesh, links_of_axes

NARROW = {"bf16": "bfloat16", "fp16": "float16"}
"""Short names of the dtypes that gradients are rounded to."""
EVERY = "*"
"""In place of an axis: all axes. BETWEEN: those whose groups cross nodes."""


def check_compression(text: object) -> str:
    """The text of a compression. Raises ValueError."""
    if isinstance(text, str) and text in NARROW:
        return text
    raise ValueError(f'{text!r} is no compression of gradients: write "bf16" or "fp16"')


def describe_compression(compression: str) -> str:
    return f"gradients in {compression}"


def sent_share(compression: str, dtype: str) -> float:
    """Fraction of the bytes of gradients of this dtype that a reduction sends; 1 where it is not compressed."""
    return 2.0 / {"float32": 4, "float64": 8}.get(dtype, 2) if compression else 1.0


def compressed_axes(mesh: Mesh, wanted: Mapping[str, str], devices_per_node: int) -> Axes:
    """The axes of a mesh for layouts, with the compression wanted by name, by BETWEEN or by EVERY. Raises BadInput for a name
    that is no axis."""
    if unknown := sorted(set(wanted) - {*mesh.names, EVERY, BETWEEN}):
        raise BadInput(f"{unknown[0]!r} is no axis of the mesh {mesh}", "options['compress']",
                       f'pin a mesh with this axis, such as "mesh": {{"{unknown[0]}": {mesh.size}}}, or write "compress": '
                       f'"{wanted[unknown[0]]}" for the axes between nodes')
    links = links_of_axes(dict(zip(mesh.names, mesh.shape)), devices_per_node)
    return tuple(replace(axis, compression=wanted.get(axis.name) or wanted.get(EVERY) or (
        wanted.get(BETWEEN, "") if links.get(axis.name) in (BETWEEN, BOTH) else "")) for axis in mesh.layout_axes)
