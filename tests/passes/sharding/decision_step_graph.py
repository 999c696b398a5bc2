"""Build the step graph of a decision: an oracle for those of plans, and a check that a step takes its cost.

Transfers are the paid segments (`passes.sharding.oracle.comm_attribution`); the first operation that reads the end of a
segment waits for it.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.cost_model.cost_terms import Message, Prices, price
from passes.graph.decision import Decision
from passes.graph.layouts import Layout, local_bytes
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.oracle.comm_attribution import CommAttribution, readers_of
from passes.sharding.oracle.cost_check import DecisionCost, boundary
from passes.sharding.pricing.decision_terms import LocalSizes, group_kernels
from passes.sharding.pricing.redistribution import bucket_bytes_of, priced_hop
from passes.simulation.step_graph import StepCall, StepGraph, Transfer, TransferHop, with_gradients


def step_graph(
    graph: PlacementGraph, groups: Sequence[OpGroup], held: frozenset[int], decision: Decision, cost: DecisionCost,
    prices: Prices,
 *, blocks: Sequence[str] | None = None, call_us: float = 0.0, name: str = "graph",
    bucket_bytes: float | None = None,
) -> StepGraph:
    """The step graph. held: values that forward saves for backward. cost: the decision's cost, by the same prices.
    blocks: module path of each operation (None: its repeated block). call_us: overhead of entering forward, or backward."""
    made = _DecisionStepGraph(graph, groups, held, decision, prices,
                              bucket_bytes_of(graph) if bucket_bytes is None else bucket_bytes)
    calls = made.calls(blocks or [op.block for op in graph.operations])
    training = any(op.phase == BACKWARD for op in graph.operations)
    return StepGraph(
        name=name,
        training=training,
        calls=with_gradients(calls) if training else calls,
        legs=(*made.legs(), *made.reductions()),
        tangents={value.name: float(value.bytes) for value in graph.values if value.kind == "tangent"},
        parameter_bytes=cost.parameter_bytes,
        gradient_bytes=cost.gradient_bytes,
        optimizer_bytes=cost.optimizer_bytes,
        call_us=call_us,
        optimizer_us=cost.optimizer,
    )


class _DecisionStepGraph:
    def __init__(self, graph: PlacementGraph, groups: Sequence[OpGroup], held: frozenset[int], decision: Decision,
                 prices: Prices, bucket_bytes: float):
        self.graph, self.groups, self.held, self.decision = graph, groups, held, decision
        self.prices, self.bucket_bytes = prices, bucket_bytes

    def calls(self, blocks: Sequence[str]) -> tuple[StepCall, ...]:
        """Each kernel is attached to one call; operations fused into it take no time."""
        found: dict[int, StepCall] = {}
        for group in self.groups:
            operations = [self.graph.operations[i] for i in group.operations]
            edge = ((self.graph.values[v], p) for v, p in boundary(self.graph, group, self.decision))
            kernels = group_kernels(self.graph, operations, self.decision.operations, edge, LocalSizes(self.decision.axes),
                                    self.prices.keyed)
            for op in operations:
                kernel = kernels.get(op.index)
                us = price(kernel, self.prices) if kernel else 0.0
                kind = op.kind if op.heavy else "pointwise" if us else "view"
                found[op.index] = self._call(op, us, kind, blocks[op.index])
        return tuple(found[i] for i in sorted(found))

    def _call(self, op: Operation, us: float, kernel: str, block: str) -> StepCall:
        layouts = self.decision.operations[op.index]
        return StepCall(
            name=op.name,
            phase=op.phase,
            block=block,
            us=us,
            reads=tuple((self._name(v), layout) for v, layout in zip(op.inputs, layouts.inputs)),
            result_bytes=tuple(self._bytes(v, layout) for v, layout in zip(op.outputs, layouts.outputs)),
            saved=tuple(v in self.held for v in op.outputs),
            view_of=self._name(op.inputs[0]) if op.inputs and op.kind == "view" else None,
            kernel=kernel,
        )

    def legs(self) -> Iterator[Transfer]:
        readers = readers_of(self.graph, self.decision)
        for leg in CommAttribution(self.graph, self.groups, self.held, self.decision).legs:
            value, layouts = self.graph.values[leg.route.value], [leg.route.layout(k) for k in range(leg.start, leg.stop + 1)]
            reader = readers.get((value.index, leg.route), "")
            made_backward = value.producer is not None and self.graph.operations[value.producer].phase == BACKWARD
            made = self._leg(value, reader, layouts, made_backward and not reader,
                             self.bucket_bytes if leg.gradient else 0.0)
            yield replace(made, result_bytes=0.0, once=True) if leg.held else made

    def reductions(self) -> Iterator[Transfer]:
        """Small partial sums that operations reduce where they compute them."""
        for op in self.graph.operations:
            rows = self.decision.operations[op.index]
            for v, made, after in zip(op.outputs, rows.made, rows.outputs):
                layouts = [made]
                for axis in (a for a in range(len(made)) if made[a] != after[a]):
                    layouts.append((*layouts[-1][:axis], after[axis], *layouts[-1][axis + 1:]))
                if len(layouts) > 1:
                    yield self._leg(self.graph.values[v], op.name, layouts, False, 0.0)

    def _leg(self, value: Value, reader: str, layouts: Sequence[Layout], gradient: bool, bucket_bytes: float) -> Transfer:
        hops = []
        for layout, after in itertools.pairwise(layouts):
            (axis,) = [a for a in range(len(layout)) if layout[a] != after[a]]
            hop = priced_hop(value, layout, axis, after[axis], self.decision.axes, self.prices, bucket_bytes)
            assert hop is not None, f"{value.name} takes an illegal hop from {layout} to {after}"
            nbytes = max(hop.term.bytes, 1.0) if isinstance(hop.term, Message) else 0.0
            hops.append(TransferHop(hop.collective, self.decision.axes[axis].name, nbytes, hop.cost))
        return Transfer(self._name(value.index), reader, layouts[0], layouts[-1], tuple(hops),
                    self._bytes(value.index, layouts[-1]), value.spec.dtype, gradient)

    def _bytes(self, v: int, layout: Layout) -> float:
        return local_bytes(self.graph.values[v], layout, self.decision.axes)

    def _name(self, v: int) -> str:
        """Name of the call that computes a value, or of the graph input."""
        value = self.graph.values[v]
        return value.name if value.producer is None else self.graph.operations[value.producer].name
