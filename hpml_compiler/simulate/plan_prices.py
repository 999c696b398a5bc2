"""Times of a plan's operations and collectives, predicted by the plan or by a cost model, for all or part of the rows."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from hpml_compiler.plans.plan_terms import kernel_of, message_of, update_of
from hpml_compiler.plans.schema import GraphPlan, HopPlan, Redistribution
from hpml_compiler.simulate.local_sizes import LocalView
from passes.cost_model.cost_terms import Message, Slice, copy, price
from passes.cost_model.energy_model import link_j
from passes.cost_model.measured.mesh_prices import MeshPrices


class PlanPrices(Protocol):
    """Times in µs. part: the share of the rows (1 / microbatches)."""

    def operation_us(self, name: str, part: float = 1.0) -> float: ...

    def hop_us(self, move: Redistribution, hop: HopPlan, part: float = 1.0) -> float: ...

    def optimizer_us(self) -> float: ...

    def accumulate_us(self) -> float:
        """Time to accumulate the gradients of one more microbatch."""
        ...

    def link_j(self, move: Redistribution, hop: HopPlan, part: float = 1.0) -> float:
        """Energy of the links for one rank, in J."""
        ...

    def call_us(self) -> float:
        """Overhead of calling the compiled forward, or backward, besides its kernels."""
        ...


class RepricedPlan:
    """The plan's cost terms (`hpml_compiler.plans.plan_terms`) at the prices of a mesh, ignoring the plan's own predictions."""

    def __init__(self, graph: GraphPlan, prices: MeshPrices):
        self.graph, self.prices, self.view = graph, prices, LocalView(graph)

    def operation_us(self, name: str, part: float = 1.0) -> float:
        """Time of one run of an operation; a fused kernel counts for the operation that carries its bytes."""
        kernel = kernel_of(self.graph.operations[name])
        if kernel is None:
            return 0.0
        if part != 1.0 and not self.view.is_whole(name):
            fixed = self.view.fixed_bytes(name)
            kernel = replace(kernel, flops=kernel.flops * part, bytes=fixed + (kernel.bytes - fixed) * part)
        return price(kernel, self.prices)

    def hop_us(self, move: Redistribution, hop: HopPlan, part: float = 1.0) -> float:
        return price(self._message(move, hop, part), self.prices)

    def link_j(self, move: Redistribution, hop: HopPlan, part: float = 1.0) -> float:
        term = self._message(move, hop, part)
        return 0.0 if isinstance(term, Slice) else link_j(term.collective, self.prices.mesh.axes[term.axis], term.bytes)

    def _message(self, move: Redistribution, hop: HopPlan, part: float) -> Message[float] | Slice:
        """Cost term of a collective; gradients, and values that depend on parameters only, keep all bytes for any part."""
        term = message_of(hop, self.view.axes)
        if part == 1.0 or isinstance(term, Slice) or self.view.is_gradient(move) or self.view.is_whole(move.value):
            return term
        return replace(term, bytes=term.bytes * part)

    def optimizer_us(self) -> float:
        if not self.graph.training:
            return 0.0
        return math.fsum(price(update_of(p), self.prices) for p in self.graph.parameters.values() if p.trainable)

    def call_us(self) -> float:
        return 0.0

    def accumulate_us(self) -> float:
        """Reads two and writes one."""
        return copy(3.0 * self.graph.memory.gradients, self.prices)


class PlannedPrices:
    """The plan's own predictions; for a part of the rows they scale like `reference`, or with the rows without one."""

    def __init__(self, graph: GraphPlan, reference: RepricedPlan | None = None):
        self.graph, self.reference, self.view = graph, reference, LocalView(graph)

    def operation_us(self, name: str, part: float = 1.0) -> float:
        whole = self.graph.operations[name].predicted_us
        if part == 1.0 or not whole:
            return whole
        if self.reference is None:
            return whole * (1.0 if self.view.is_whole(name) else part)
        return whole * _ratio(self.reference.operation_us(name, part), self.reference.operation_us(name))

    def hop_us(self, move: Redistribution, hop: HopPlan, part: float = 1.0) -> float:
        whole = hop.predicted_us
        if part == 1.0 or not whole or self.view.is_gradient(move):
            return whole
        if self.reference is None:
            return whole * (1.0 if self.view.is_whole(move.value) else part)
        return whole * _ratio(self.reference.hop_us(move, hop, part), self.reference.hop_us(move, hop))

    def optimizer_us(self) -> float:
        return self.graph.predicted.optimizer_us

    def accumulate_us(self) -> float:
        return self.reference.accumulate_us() if self.reference else 0.0

    def link_j(self, move: Redistribution, hop: HopPlan, part: float = 1.0) -> float:
        return self.reference.link_j(move, hop, part) if self.reference else 0.0

    def call_us(self) -> float:
        return self.graph.predicted.overhead_us / (2 if self.graph.training else 1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
