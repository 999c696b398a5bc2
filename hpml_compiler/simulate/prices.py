"""Times of what a plan lists: as it predicts them, or priced anew by a cost model, whole or for a part of the rows."""
from __future__ import annotations

import math
from typing import Protocol

from hpml_compiler.plans.schema import GraphPlan, Redistribution, Step
from hpml_compiler.simulate.local import LocalView, itemsize
from passes.costs.base import BUCKET_BYTES, CostModel, OptimizerModel
from passes.costs.energy import link_j
from passes.costs.prices import KINDS
from passes.machine.mesh import Mesh
from passes.schedule.buckets import REDUCING

SLICE_US = 1e-3
"""What a plan charges for a local step, which moves nothing over a link (`passes.partition.redistribution.SLICE_US`)."""


class PlanPrices(Protocol):
    """Times in µs. part: the share of the rows (1 / microbatches)."""

    def operation_us(self, name: str, part: float = 1.0) -> float: ...

    def step_us(self, move: Redistribution, step: Step, part: float = 1.0) -> float: ...

    def optimizer_us(self) -> float: ...

    def accumulate_us(self) -> float:
        """Adding the gradients of one more microbatch to those there are."""
        ...

    def link_j(self, move: Redistribution, step: Step, part: float = 1.0) -> float:
        """Joules that the links take of one rank."""
        ...

    def call_us(self) -> float:
        """What calling the compiled forward, or backward, takes besides its kernels."""
        ...


class Repriced:
    """Every operation from its kind, dtype, FLOPs and bytes, every collective from its kind, axis and bytes."""

    def __init__(self, graph: GraphPlan, mesh: Mesh, cost: CostModel):
        self.graph, self.mesh, self.cost, self.view = graph, mesh, cost, LocalView(graph)
        trained = sum(p.bytes_whole for p in graph.parameters.values() if p.trainable)
        self.bucket_bytes = float(min(BUCKET_BYTES, trained))

    def operation_us(self, name: str, part: float = 1.0) -> float:
        """The operations of a fused kernel are priced with the one that carries its bytes."""
        operation = self.graph.operations[name]
        if operation.kind == "view":
            return 0.0
        flops, moved = operation.flops, operation.bytes_moved
        if part != 1.0 and name not in self.view.fixed:
            fixed = self.view.fixed_bytes(name)
            flops, moved = flops * part, fixed + (moved - fixed) * part
        return self.cost.compute_us(flops, moved, operation.dtype, KINDS.get(operation.kind, operation.kind))

    def step_us(self, move: Redistribution, step: Step, part: float = 1.0) -> float:
        """As `passes.partition.redistribution.change` prices it: small gradients pay their part of a bucket; what is
        split anywhere but in the outermost dim is packed before or unpacked after."""
        if not step.bytes:
            return SLICE_US
        gradient = self.view.is_gradient(move)
        moved, axis = self._moved(move, step, part), self.mesh.axis(step.axis)
        if gradient and step.collective in REDUCING and moved < self.bucket_bytes:
            whole = self.cost.collective_us(step.collective, axis, self.bucket_bytes) + 2 * self.copy_us(self.bucket_bytes)
            return whole * moved / self.bucket_bytes
        return self.cost.collective_us(step.collective, axis, moved) + self._packings(move, step) * self.copy_us(moved)

    def link_j(self, move: Redistribution, step: Step, part: float = 1.0) -> float:
        return link_j(step.collective, self.mesh.axis(step.axis), self._moved(move, step, part)) if step.bytes else 0.0

    def _moved(self, move: Redistribution, step: Step, part: float) -> float:
        """Bytes of a step: of gradients and of what comes of parameters alone, always all."""
        return step.bytes * (1.0 if self.view.is_gradient(move) or move.value in self.view.fixed else part)

    def _packings(self, move: Redistribution, step: Step) -> int:
        """How many ends of the step are split in a dim that is not the outermost one."""
        if move.consumer == move.value:
            return 0  # a sum where it is made
        axis = list(self.graph.mesh).index(step.axis)
        ends = {"all_gather": (move.source,), "reduce_scatter": (move.target,), "all_to_all": (move.source, move.target)}
        return sum(not _outermost(move.shape, end[axis]) for end in ends.get(step.collective, ()))

    def copy_us(self, nbytes: float) -> float:
        return self.cost.compute_us(0.0, nbytes, "float32", "pointwise")

    def optimizer_us(self) -> float:
        """AdamW on every trained parameter in its own dtype. A cost model has one dtype; its time goes with the bytes
        that the optimizer reads and writes, so another dtype counts as so many more or fewer elements."""
        if not self.graph.training:
            return 0.0
        cpu = self.mesh.device.kind == "cpu"
        traffic = getattr(self.cost, "optimizer", OptimizerModel()).traffic_bytes(cpu)
        return math.fsum(
            self.cost.optimizer_us(p.bytes_per_device / size * OptimizerModel.adamw(size).traffic_bytes(cpu) / traffic)
            for p in self.graph.parameters.values() if p.trainable for size in (itemsize(p.dtype),)
        )

    def call_us(self) -> float:
        return 0.0

    def accumulate_us(self) -> float:
        """Reads two and writes one."""
        return self.copy_us(3.0 * self.graph.memory.gradients)


class AsPlanned:
    """The plan's own predictions; for a part of the rows they scale as `reference` says, else with the rows."""

    def __init__(self, graph: GraphPlan, reference: Repriced | None = None):
        self.graph, self.reference, self.view = graph, reference, LocalView(graph)

    def operation_us(self, name: str, part: float = 1.0) -> float:
        whole = self.graph.operations[name].predicted_us
        if part == 1.0 or not whole:
            return whole
        if self.reference is None:
            return whole * (1.0 if name in self.view.fixed else part)
        return whole * _ratio(self.reference.operation_us(name, part), self.reference.operation_us(name))

    def step_us(self, move: Redistribution, step: Step, part: float = 1.0) -> float:
        whole = step.predicted_us
        if part == 1.0 or not whole or self.view.is_gradient(move):
            return whole
        if self.reference is None:
            return whole * (1.0 if move.value in self.view.fixed else part)
        return whole * _ratio(self.reference.step_us(move, step, part), self.reference.step_us(move, step))

    def optimizer_us(self) -> float:
        return self.graph.predicted.optimizer_us

    def accumulate_us(self) -> float:
        return self.reference.accumulate_us() if self.reference else 0.0

    def link_j(self, move: Redistribution, step: Step, part: float = 1.0) -> float:
        return self.reference.link_j(move, step, part) if self.reference else 0.0

    def call_us(self) -> float:
        return self.graph.predicted.overhead_us / (2 if self.graph.training else 1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _outermost(shape: tuple[int, ...], placement: str) -> bool:
    """Whether the parts of a split lie one after another in memory; a later factor of a dim never counts as outermost,
    since a plan does not say the sizes of the factors before it."""
    if not placement.startswith("S"):
        return True
    dim, _, factor = placement[2:-1].partition(".")
    return math.prod(shape[: int(dim)]) == 1 and factor in ("", "0")
