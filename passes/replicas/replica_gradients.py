"""Gradients of replicas: each rank's own part of a parameter's gradient, in place of the sum over an axis.

Let L(p_1, ..., p_n) be the loss of the batch where the rows of rank k are computed with the parameters p_k. Rank k trains by
n dL/dp_k: for a mean over rows that is the gradient of the mean over its own rows, and on average it is the gradient of the
whole batch. What else is summed over the axis (the loss, statistics of BatchNorm, a count of tokens) stays a sum over all
replicas.
"""
from __future__ import annotations

from passes.errors import BadInput
from passes.graph.decision import Decision, Route
from passes.graph.placement_graph import PlacementGraph, Value
from passes.graph.step_phase import BACKWARD
from passes.hardware.axis import Axes
from passes.hardware.gradient_compression import steps_apart
from passes.op_rules.base import PARTIAL, REPLICATE
from passes.replicas.replica_axis_rule import has_rows, of_parameters

NEXT_STEP = "leave local_steps out for this model, or take the operation out of the compiled part"


def replica_axes(axes: Axes) -> list[int]:
    """Positions of the axes along which replicas train apart."""
    return [k for k, axis in enumerate(axes) if steps_apart(axis.compression)]


class ReplicaGradients:
    """Reads in backward of which each replica has its own value. operations: those whose results are gradients of parameters
    alone, or on the way to them; none without replicas."""

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
    for op in reversed(graph.operations):
        if op.phase == BACKWARD and all(
                v not in others and (v in gradients or graph.values[v].users) and found.issuperset(graph.values[v].users)
                for v in op.outputs):
            found.add(op.index)
    return frozenset(found)


def check_replicas(graph: PlacementGraph, decision: Decision) -> None:
    """Raise BadInput where replicas would not train by the rule above: an operation with parameters that runs on all rows, a
    gradient that is gathered, or a result that differs between ranks."""
    trained = of_parameters(graph)
    for k in replica_axes(decision.axes):
        axis = decision.axes[k]
        differ = {v.index for v in graph.values if v.kind == "parameter"}
        apart = _towards_gradients(graph)
        for op in graph.operations:
            layouts = decision.operations[op.index]
            placed = [layout[k] for layout in (*layouts.inputs, *layouts.made)]
            split = any(isinstance(p, tuple) for p in placed)
            if op.index in trained and has_rows(op, graph) and not split:
                raise BadInput(f"{op.name} ({op.target}) is not computed row by row, so that the {axis.size} replicas along "
                               f"{axis.name!r} cannot have rows of their own", "options['local_steps']", NEXT_STEP)
            if op.index not in apart and not split and not differ.isdisjoint(op.inputs):
                differ.update(v for v, made in zip(op.outputs, layouts.made) if made[k] == REPLICATE)
        for (v, p), route in zip(graph.outputs, decision.outputs, strict=True):
            places = [route.source[k], *(hop.layout[k] for hop in route.hops)]
            if p in graph.gradients:
                if any(a != b and a != PARTIAL for a, b in zip(places, places[1:])):
                    shape = " x ".join(map(str, graph.values[p].spec.shape))
                    raise BadInput(f"a parameter of shape {shape} has rows of the batch", "options['local_steps']", NEXT_STEP)
            elif v in differ and places[-1] == REPLICATE:
                raise BadInput(f"the result {graph.values[v].name} is computed from parameters without rows of the batch, so "
                               f"that the {axis.size} replicas along {axis.name!r} would have different values",
                               "options['local_steps']", "compute it outside of the compiled model, or leave local_steps out")
