"""Key of the measurements of one call on one rank."""
from __future__ import annotations

from collections.abc import Sequence

from passes.graph.layouts import Layout, local_shape
from passes.graph.placement_graph import Operation, PlacementGraph
from passes.hardware.axis import Axes

_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "bool": "b8"}


def measurement_key_of(
    graph: PlacementGraph, op: Operation, inputs: Sequence[Layout], made: Sequence[Layout], axes: Axes
) -> str:
    """`aten.mm.default f32[256,128] f32[128,64] -> f32[256,64]`: the operator with local operands and results."""
    def spec(v: int, layout: Layout) -> str:
        value = graph.values[v]
        shape = ",".join(map(str, local_shape(value, layout, axes)))
        return f"{_SHORT.get(value.spec.dtype, value.spec.dtype)}[{shape}]"

    read = " ".join(spec(v, p) for v, p in zip(op.inputs, inputs))
    return f"{op.target} {read} -> {' '.join(spec(v, p) for v, p in zip(op.outputs, made))}"
