"""The terms of a plan (`passes.cost_model.cost_terms`): all that its cost is made of, so that it is priced anew without a
solver."""
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
    """The kernel that an operation stands for; None for a view, and within a fused kernel for all but one."""
    if operation.kind == "view":
        return None
    return Kernel(operation.flops, operation.bytes_moved, operation.dtype, operation.kind)


def message_of(hop: HopPlan, axes: Axes) -> Message[float] | Slice:
    """A hop of a redistribution."""
    if not hop.bytes:
        return Slice()
    [number] = [k for k, axis in enumerate(axes) if axis.name == hop.axis]
    return Message(hop.collective, number, float(hop.bytes), tuple(map(float, hop.outer)),
                   hop.bucket_bytes)


def update_of(parameter: ParameterPlan) -> Update[float]:
    """The optimizer's step over a parameter."""
    return Update(parameter.bytes_per_device / item_bytes(parameter.dtype), parameter.dtype)


def terms_of(graph: GraphPlan) -> Iterator[tuple[Part, Term[float], int]]:
    """(part of the step, term, how often a step has it), equal ones together. Parameters that are listed once for several
    layers are all listed, so each counts once."""
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
    """What each part of a step costs by these prices."""
    total: dict[Part, float] = {"compute": 0.0, "communication": 0.0, "optimizer": 0.0}
    for part, term, count in terms_of(graph):
        total[part] += count * price(term, prices)
    return total
