"""Words for placements, from the roles of dims in the rules of their operators: "tp: columns", "dp: batch", "dp: ZeRO-3"."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpml_compiler.plans.record_fields import Placements
from hpml_compiler.plans.schema import GraphPlan, ParameterPlan
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, parse_placement
from passes.op_rules.dim_texts import parse_dims

HEAVY_KINDS = ("matmul", "attention", "convolution", "embedding")
WHOLE = "whole"
SUMS, MAXIMA = "partial sums", "partial maxima"
Words = dict[str, str]
"""Word by mesh axis, without the axes that a value is whole on."""


def value_words(placements: Sequence[str], dims: str, mesh: Mapping[str, int]) -> Words:
    """dims: sizes and roles of the value's dims; "" if they are unknown."""
    known = parse_dims(dims)
    found = {axis: _word(each, known) for (axis, size), each in zip(mesh.items(), placements) if size > 1}
    return {axis: word for axis, word in found.items() if word}


def _word(placement: str, dims: Sequence[Sequence[tuple[int, str]]]) -> str:
    place = parse_placement(placement)
    if isinstance(place, str):
        return {PARTIAL: SUMS, PARTIAL_MAX: MAXIMA}.get(place, "")
    dim, factor = place
    role = dims[dim][factor][1] if dim < len(dims) and factor < len(dims[dim]) else ""
    return role or (f"factor {factor} of dim {dim}" if factor else f"dim {dim}")


def parameter_words(graph: GraphPlan, name: str, uses: Mapping[str, Placements]) -> Words:
    """Split of a parameter in use; where it is stored in parts and used whole, the name of that technique. uses: see
    `uses_of`."""
    parameter = graph.parameters[name]
    stored = value_words(parameter.placements, parameter.dims, graph.mesh)
    used = parameter.held or uses.get(name, ())
    if not used:
        return stored
    found = {}
    for axis, place in zip(graph.mesh, used):
        if place.startswith("S"):
            found[axis] = stored.get(axis) or f"split in use ({place})"
        elif axis in stored:
            found[axis] = technique(parameter)
    return found


def technique(parameter: ParameterPlan) -> str:
    """Name of what is done to a parameter that is stored in parts and used whole."""
    if not parameter.trainable:
        return "stored in parts"
    return "ZeRO-2" if parameter.held else "ZeRO-3"


def uses_of(graph: GraphPlan) -> dict[str, Placements]:
    """For each parameter that listed operations read, the placements in which forward uses it, after gathering: of the first
    product that reads it or a view of it, else of its first reader."""
    origin: dict[str, str] = {name: name for name in graph.parameters}
    products: dict[str, Placements] = {}
    readers: dict[str, Placements] = {}
    for name, operation in graph.operations.items():
        if operation.backward:
            continue
        heavy = operation.kind in HEAVY_KINDS
        if len(operation.sources) == 1 and operation.sources[0] in origin and not heavy:
            origin[name] = origin[operation.sources[0]]
        for source, placements in zip(operation.sources, operation.inputs):
            if source in origin:
                (products if heavy else readers).setdefault(origin[source], placements)
    return {**readers, **products}


def words_text(words: Mapping[str, str]) -> str:
    """Words as "dp: batch, tp: columns", axes with the same word together; "whole" if there is none."""
    axes: dict[str, list[str]] = {}
    for axis, word in words.items():
        axes.setdefault(word, []).append(axis)
    return ", ".join(f"{' and '.join(own)}: {word}" for word, own in axes.items()) or WHOLE


def dims_text(dims: str) -> str:
    """Sizes with roles for people: "16 x 8192 x 4096"."""
    return " x ".join(str(_size(row)) for row in parse_dims(dims))


def _size(row: Sequence[tuple[int, str]]) -> int:
    size = 1
    for n, _ in row:
        size *= n
    return size
