"""Cost terms of a plan (`passes.cost_model.cost_terms`), from which it can be priced again without a solver."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from hpml_compiler.plans.schema import GraphPlan, HopPlan, OperationPlan, ParameterPlan
from passes.cost_model.cost_terms import Kernel, Message, Prices, Slice, Term, Update, price
from passes.cost_model.efficiency_curves import item_bytes
from passes.hardware.axis import Axes, device_axes

Part = Literal["compute", "communication", "optimizer"]


def kernel_of(operation: OperationPlan) -> Kernel[float] | None:
    """The kernel of an operation, as the cost model prices it; None for a view, and for the operations of a fused kernel that
    carry no part of its cost."""
    if operation.kind == "view":
        return None
    return Kernel(operation.flops, operation.bytes_moved, operation.dtype, operation.kind)


def message_of(hop: HopPlan, axes: Axes) -> Message[float] | Slice:
    """The cost term of one collective of a redistribution, or of a local slice."""
    if not hop.bytes:
        return Slice()
    [number] = [k for k, axis in enumerate(axes) if axis.name == hop.axis]
    return Message(hop.collective, number, float(hop.bytes), tuple(map(float, hop.outer)),
                   hop.bucket_bytes)


def update_of(parameter: ParameterPlan) -> Update[float]:
    """The cost term of the optimizer step over one parameter."""
    return Update(parameter.bytes_per_device / item_bytes(parameter.dtype), parameter.dtype)


def terms_of(graph: GraphPlan) -> Iterator[tuple[Part, Term[float], int]]:
    """Cost terms of one step as (part of the step, term, count), equal terms merged. A plan lists the parameters of every
    layer, so each parameter counts once."""
    counts: Counter[tuple[Part, Term[float]]] = Counter()
    for operation in graph.operations.values():
        kernel = kernel_of(operation)
        if kernel is not None:
            counts["compute", kernel] += graph.runs(operation)
    axes = device_axes(graph.mesh)
    for move in graph.redistributions:
        for hop in move.hops:
            counts["communication", message_of(hop, axes)] += move.multiplicity
    if graph.training:
        counts.update(("optimizer", update_of(p)) for p in graph.parameters.values() if p.trainable)
    return ((part, term, count) for (part, term), count in counts.items())


def priced(graph: GraphPlan, prices: Prices) -> dict[Part, float]:
    """Cost of each part of a step at the given prices."""
    total: dict[Part, float] = {"compute": 0.0, "communication": 0.0, "optimizer": 0.0}
    for part, term, count in terms_of(graph):
        total[part] += count * price(term, prices)
    return total
