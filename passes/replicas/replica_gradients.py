"""Gradients of replicas: each rank's own part of a parameter's gradient, in place of the sum over an axis.

Let L(p_1, ..., p_n) be the loss of the batch where the rows of rank k are computed with the parameters p_k. Rank k trains by
n dL/dp_k: for a mean over rows that is the gradient of the mean over its own rows, and on average it is the gradient of the
whole batch. What else is summed over the axis in forward (the loss, a count of tokens) stays a sum over all replicas.
"""
from __future__ import annotations

from passes.errors import BadInput
from passes.graph.decision import Decision, Route
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD
from passes.hardware.axis import Axes
from passes.hardware.gradient_compression import steps_apart
from passes.op_rules.base import PARTIAL, REPLICATE, Placement
from passes.replicas.replica_axis_rule import has_rows, of_parameters


def replica_axes(axes: Axes) -> list[int]:
    """Positions of the axes along which replicas train apart."""
    return [k for k, axis in enumerate(axes) if steps_apart(axis.compression)]


class ReplicaGradients:
    """Reads in backward of which each replica has its own value. operations: those whose results are gradients of parameters
    alone, or on the way to them, and have no rows; none without replicas."""

    def __init__(self, graph: PlacementGraph, decision: Decision) -> None:
        self.axes = replica_axes(decision.axes)
        self.operations = _towards_gradients(graph) if self.axes else frozenset[int]()
        self.outputs = {route for (_, p), route in zip(graph.outputs, decision.outputs, strict=True)
                        if self.axes and p in graph.gradients}
        self._graph = graph

    def are_own(self, route: Route, reader: int | None) -> bool:
        """True if a partial sum is read by its rank alone. reader: the operation; None for an output of the graph."""
        if reader is None:
            return route in self.outputs
        return reader in self.operations and not self._graph.values[route.value].batch

    def made_for(self, value: Value) -> tuple[bool, bool]:
        """For a value that is summed as soon as it is made: whether the sum is read, and whether each rank's part is."""
        if not self.axes:
            return True, False
        found = {reader in self.operations and not value.batch for reader in value.users}
        found |= {p in self._graph.gradients for v, p in self._graph.outputs if v == value.index}
        return False in found or not found, True in found


def _towards_gradients(graph: PlacementGraph) -> frozenset[int]:
    gradients, found = {*graph.gradients.values()}, set[int]()
    others = {v for v, p in graph.outputs if p not in graph.gradients}

    def leads_there(v: int) -> bool:
        value = graph.values[v]
        has_reader = v in gradients or bool(value.users) and not value.batch
        return v not in others and has_reader and found.issuperset(value.users)

    for op in reversed(graph.operations):
        if op.phase == BACKWARD and all(map(leads_there, op.outputs)):
            found.add(op.index)
    return frozenset(found)


def check_replicas(graph: PlacementGraph, decision: Decision) -> None:
    """Raise BadInput where replicas would not train by the rule above."""
    for k in replica_axes(decision.axes):
        _ReplicaCheck(graph, decision, k).run()


class _ReplicaCheck:
    """The conditions on one axis of replicas: operations with parameters run on this rank's rows; in backward, rows read no sum
    over rows, in which each addend would need the parameters of its replica; gradients are not gathered; and no result differs
    between ranks."""

    def __init__(self, graph: PlacementGraph, decision: Decision, axis: int) -> None:
        self.graph, self.decision, self.axis = graph, decision, axis
        self.trained, self.apart = of_parameters(graph), _towards_gradients(graph)
        self.of = f"the {decision.axes[axis].size} replicas along {decision.axes[axis].name!r}"
        self.differ = {v.index for v in graph.values if v.kind == "parameter"}

    def run(self) -> None:
        for op in self.graph.operations:
            self._operation(op)
        for (v, p), route in zip(self.graph.outputs, self.decision.outputs, strict=True):
            places = self._places(route)
            if p in self.graph.gradients:
                if any(a != b and a != PARTIAL for a, b in zip(places, places[1:])):
                    shape = " x ".join(map(str, self.graph.values[p].spec.shape))
                    raise self._refused(f"a parameter of shape {shape} has rows of the batch")
            elif v in self.differ and places[-1] == REPLICATE:
                raise self._refused(f"the result {self.graph.values[v].name} is computed from parameters without rows of the "
                                    f"batch, so that {self.of} would have different values")

    def _operation(self, op: Operation) -> None:
        layouts, k = self.decision.operations[op.index], self.axis
        split = any(isinstance(layout[k], tuple) for layout in (*layouts.inputs, *layouts.made))
        if op.index in self.trained and has_rows(op, self.graph) and not split:
            raise self._refused(f"{op.name} ({op.target}) is not computed row by row, so that {self.of} cannot have rows of "
                                "their own (which they must divide)")
        if op.phase == BACKWARD and op.index in self.trained:
            summed = any(made[k] != after[k] and not self.apart.issuperset(self.graph.values[v].users)
                         for v, made, after in zip(op.outputs, layouts.made, layouts.outputs))
            if summed or op.index not in self.apart and any(self._moves(op, k) for k in range(len(op.inputs))):
                raise self._refused(f"in backward, {op.name} ({op.target}) needs a sum over all rows, as BatchNorm does, which "
                                    f"{self.of} compute with different parameters")
        if op.index not in self.apart and not split and not self.differ.isdisjoint(op.inputs):
            self.differ.update(v for v, made in zip(op.outputs, layouts.made) if made[k] == REPLICATE)

    def _moves(self, op: Operation, position: int) -> bool:
        """True if an operand that depends on parameters is summed or gathered along the axis."""
        places = self._places(self.decision.routes[op.index, position])
        maker = self.graph.values[op.inputs[position]].producer
        return maker in self.trained and any(a not in (b, REPLICATE) for a, b in zip(places, places[1:]))

    def _places(self, route: Route) -> list[Placement]:
        return [route.source[self.axis], *(hop.layout[self.axis] for hop in route.hops)]

    def _refused(self, what: str) -> BadInput:
        return BadInput(what, "options['local_steps']",
                        "leave local_steps out for this model, or take that out of the compiled part")
