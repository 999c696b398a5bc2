"""Build the `GraphPlan` of a solution: layouts and indices become names, placement strings and bytes."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpml_compiler.plans.from_decision.replicated_values import left_whole
from hpml_compiler.plans.from_decision.user_names import UserNames, listing
from hpml_compiler.plans.schema import (
    DecisionRecord,
    GraphPlan,
    HopPlan,
    MemoryBytes,
    Objective,
    OperationPlan,
    ParameterPlan,
    PredictedCost,
    Redistribution,
    SolverReport,
)
from passes.cost_model.cost_terms import Kernel, Message, Slice, price
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.layouts import Layout, local_bytes, parse_layout
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD
from passes.hardware.mesh import Mesh
from passes.op_rules.base import format_placement
from passes.sharding.dim_roles import DimRoles, dim_roles
from passes.sharding.formulation.decision_decoder import pins
from passes.sharding.graph_boundary import left_sharded
from passes.sharding.oracle.comm_attribution import readers_of
from passes.sharding.oracle.cost_check import boundary
from passes.sharding.pricing.decision_terms import LocalSizes, group_kernels, hop_term, reduction_messages
from passes.sharding.search.mesh_placement import MeshPlacement
from passes.solver.problem import Edge

SHORTENED = "shortened:"
"""Prefix of the hash of a graph with fewer layers than its model."""


def placements(layout: Layout) -> tuple[str, ...]:
    return tuple(format_placement(p) for p in layout)


def graph_plan(annotated: AnalyzedGraph, mesh: Mesh, answer: MeshPlacement, *, name: str, seconds: Mapping[str, float],
               prices: MeshPrices, shortened: bool = False, objective: Objective = "time", energy_j: float | None = None,
               ) -> GraphPlan:
    """The `GraphPlan` of a solution, whose `cost` is in µs whatever the `objective` was. `energy_j`: energy of its kernels and
    collectives on all devices; idle energy during the call overhead is added here. `shortened`: the graph has fewer layers than
    the model, so one operation per class is listed with its multiplicity in the model, and the plan can be passed back to the
    planner, but not to a run (its hash has the prefix `SHORTENED`)."""
    graph, cost, solution = annotated.graph, answer.cost, answer.solution
    overhead_us = prices.overhead_us * (2 if annotated.interface.training else 1)
    if energy_j is not None:
        energy_j += overhead_us * 1e-6 * mesh.device.idle_power_w * mesh.size
    listed = listing(annotated, answer.problem, once=shortened)
    roles = dim_roles(graph, annotated.rules)
    peak = max(answer.problem.lifetimes.of(cost)) + _largest_transient(graph, answer)
    return GraphPlan(
        graph_hash=(SHORTENED if shortened else "") + annotated.hash(),
        name=name,
        training=annotated.interface.training,
        mesh=dict(zip(mesh.names, mesh.shape)),
        parameters=_parameters(annotated, answer, listed, roles),
        operations=_operations(graph, mesh, answer, prices, listed, roles),
        redistributions=(
            *(_class_redistributions if shortened else _redistributions)(graph, mesh, answer, prices, listed),
            *_reductions(graph, mesh, answer, prices, listed, shortened),
        ),
        left_whole=tuple(left_whole(annotated, mesh, listed)),
        predicted=PredictedCost(
            step_time_us=cost.step + overhead_us, overhead_us=overhead_us, compute_us=cost.compute,
            communication_us=cost.communication, optimizer_us=cost.optimizer, energy_j=energy_j,
            energy_label=None if energy_j is None else "estimated",
        ),
        memory=MemoryBytes(
            parameters=round(cost.parameter_bytes), gradients=round(cost.gradient_bytes),
            optimizer=round(cost.optimizer_bytes), activations=round(cost.activation_bytes), peak=round(peak),
        ),
        solver=SolverReport(
            status=solution.status, cost=solution.cost, bound=solution.bound, gap=solution.gap,
            variables=solution.variables, binaries=solution.binaries, constraints=solution.constraints,
            seconds=solution.seconds, solver=solution.solver, objective=objective,
        ),
        seconds=dict(seconds),
        multiplicity={
            e.name: e.multiplicity for e in answer.solved.entities if e.kind == "operations"
        } if shortened else {},
        decisions={
            entity: DecisionRecord(inputs=tuple(inputs), outputs=tuple(outputs))
            for entity, (inputs, outputs) in pins(answer.problem, solution).items()
        },
        tangents={graph.values[v].name: round(local_bytes(graph.values[v], layout, answer.decision.axes))
                  for v, layout in answer.decision.inputs.items() if graph.values[v].kind == "tangent"},
        rows=_rows(graph), rows_by_rank={axis.name: axis.rows for axis in answer.decision.axes if axis.rows},
        outputs=_outputs(annotated, answer, listed),
    )


def _outputs(annotated: AnalyzedGraph, answer: MeshPlacement, listed: UserNames) -> dict[str, tuple[str, ...]]:
    """Results besides the loss that are returned sharded."""
    return {listed.values[annotated.graph.outputs[each.number][0]]: placements(layout)
            for each, layout in left_sharded(annotated, answer.decision)}


def _rows(graph: PlacementGraph) -> int | None:
    """The size of dim 0, if the batch's tensors agree on it; else None."""
    sizes = {value.spec.shape[0] for value in graph.values if value.kind == "batch" and value.spec.shape}
    return sizes.pop() if len(sizes) == 1 else None


def _largest_transient(graph: PlacementGraph, answer: MeshPlacement) -> float:
    """The largest number of bytes of one operation's operands and results, without those that are in memory all step long."""
    largest = 0.0
    for op in graph.operations:
        rows = answer.decision.operations[op.index]
        pairs = [*zip(op.inputs, rows.inputs), *zip(op.outputs, rows.made)]
        largest = max(largest, sum(
            local_bytes(graph.values[v], p, answer.decision.axes) for v, p in pairs if v not in answer.problem.saved))
    return largest


def _parameters(annotated: AnalyzedGraph, answer: MeshPlacement, listed: UserNames, roles: DimRoles,
                ) -> dict[str, ParameterPlan]:
    found = {}
    named = {value.name: listed.values[value.index] for value in annotated.graph.values}
    gradients = {parameter: named.get(name, "") for name, parameter in annotated.interface.outputs if parameter}
    for v, layout in answer.decision.inputs.items():
        value = annotated.graph.values[v]
        if value.kind == "parameter":
            stored = answer.decision.stored(v)
            found[annotated.interface.names[value.name]] = ParameterPlan(
                shape=value.spec.shape, dtype=value.spec.dtype, placements=placements(stored),
                trainable=value.trainable, bytes_whole=value.bytes,
                bytes_per_device=round(local_bytes(value, stored, answer.decision.axes)),
                gradient=gradients.get(value.name, "") if value.trainable else "",
                held=placements(layout) if v in answer.decision.held else (), dims=roles.parameter_text(v),
                entity=answer.problem.entities.drafts[answer.problem.entities.of_input[v]].name,
            )
    return found


def _operations(graph: PlacementGraph, mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, listed: UserNames,
                roles: DimRoles) -> dict[str, OperationPlan]:
    found: dict[int, OperationPlan] = {}
    for number, groups in listed.groups.items():
        entity = answer.solved.entities[number]
        for c in groups:
            edge = ((graph.values[v], p) for v, p in
                    boundary(graph, c, answer.decision, answer.collectives.arrived[c.index]))
            kernels = group_kernels(graph, [graph.operations[i] for i in c.operations], answer.decision.operations, edge,
                                    LocalSizes(answer.decision.axes), prices.keyed)
            for i in c.operations:
                op, rows = graph.operations[i], answer.decision.operations[i]
                found[i] = OperationPlan(
                    op=op.target, block=listed.blocks[i], backward=op.phase == BACKWARD, class_id=entity.name,
                    inputs=tuple(map(placements, rows.inputs)), outputs=tuple(map(placements, rows.outputs)),
                    predicted_us=price(kernels[i], prices) if i in kernels else 0.0,
                    sources=tuple(listed.values[v] for v in op.inputs),
                    dims=tuple(map(roles.text, op.outputs)),
                    **_priced_by(graph, answer, op, kernels.get(i)),
                )
    return {graph.operations[i].name: found[i] for i in sorted(found)}


def _priced_by(graph: PlacementGraph, answer: MeshPlacement, op: Operation, kernel: Kernel[float] | None) -> dict[str, Any]:
    """Fields of `OperationPlan` that the cost model prices an operation by, on one device."""
    at = answer.decision.operations[op.index]
    first = graph.values[op.outputs[0]] if op.outputs else None
    return {
        "kind": kernel.kind if kernel and kernel.bytes else op.kind if op.heavy else "view",
        "dtype": first.spec.dtype if first else "float32", "flops": kernel.flops if kernel else 0.0,
        "bytes_moved": kernel.bytes if kernel else 0.0,
        "result_bytes": tuple(round(local_bytes(graph.values[v], p, answer.decision.axes))
                              for v, p in zip(op.outputs, at.outputs)),
        "saved": tuple(v in answer.problem.saved for v in op.outputs),
    }


def _redistributions(graph: PlacementGraph, mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, listed: UserNames,
                     ) -> list[Redistribution]:
    readers = readers_of(graph, answer.decision)
    found = []
    for leg in answer.collectives.legs:
        route, value = leg.route, graph.values[leg.route.value]
        layouts = [route.layout(k) for k in range(leg.start, leg.stop + 1)]
        found.append(Redistribution(
            value=listed.values[route.value], shape=value.spec.shape, dtype=value.spec.dtype,
            consumer=readers.get((route.value, route), ""), source=placements(layouts[0]),
            target=placements(layouts[-1]), hops=_hops(value, layouts, mesh, answer, prices, leg.gradient), held=leg.held,
        ))
    return found


def _reduced(graph: PlacementGraph, mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, listed: UserNames,
             operations: Sequence[int], multiplicity: int = 1) -> list[Redistribution]:
    """Reductions of small partial sums inside a group, done by these operations right where the sums are computed."""
    found = []
    for i in operations:
        op, rows = graph.operations[i], answer.decision.operations[i]
        hops: dict[int, list[HopPlan]] = {}
        for v, message in reduction_messages(graph, op, rows, LocalSizes(answer.decision.axes)):
            hops.setdefault(v, []).append(_hop(message, mesh, prices))
        for v, made, after in zip(op.outputs, rows.made, rows.outputs):
            if v in hops:
                value = graph.values[v]
                found.append(Redistribution(
                    value=listed.values[v], shape=value.spec.shape, dtype=value.spec.dtype, consumer=op.name,
                    source=placements(made), target=placements(after), hops=tuple(hops[v]), multiplicity=multiplicity,
                ))
    return found


def _hop(term: Message[float] | Slice, mesh: Mesh, prices: MeshPrices, axis: int = 0, compression: str = "") -> HopPlan:
    """The record of a collective, or of a local slice; `axis` is the mesh axis of a slice. compression: along the axis."""
    if isinstance(term, Slice):
        return HopPlan(collective="slice", axis=mesh.names[axis], bytes=0, predicted_us=price(term, prices))
    sent = term.sent
    said = {} if sent is term else {"compression": compression, "whole_bytes": round(term.bytes)}
    return HopPlan(collective=sent.collective, axis=mesh.names[sent.axis], bytes=max(round(sent.bytes), 1), **said,
                   predicted_us=price(term, prices), outer=tuple(map(int, sent.outer)), bucket_bytes=sent.bucket_bytes)


def _reductions(graph: PlacementGraph, mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, listed: UserNames, once: bool,
                ) -> list[Redistribution]:
    """Reductions inside the listed groups, with the multiplicity of their class if one group represents it."""
    found: list[Redistribution] = []
    for number, groups in listed.groups.items():
        count = answer.solved.entities[number].multiplicity if once else 1
        for c in groups:
            found += _reduced(graph, mesh, answer, prices, listed, c.operations, count)
    return found


def _class_redistributions(graph: PlacementGraph, mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, listed: UserNames,
                           ) -> list[Redistribution]:
    """One redistribution per class of edges, with its multiplicity."""
    by_name = {value.name: value for value in graph.values}
    found = []
    for edge, path in zip(answer.solved.edges, answer.solution.paths, strict=True):
        if not path or not edge.multiplicity:
            continue
        value = by_name[edge.name]
        layouts = [parse_layout(label) for label in (path[0].source, *(arc.target for arc in path))]
        gradient = answer.solved.entities[edge.target].kind == "parameter"
        read, consumer = _end(graph, answer, listed, edge) or (value.index, "")
        # A parameter is named as in the listed layer. A result is named after the edge's source, which need not be next to
        # the listed consumer: the first layer represents the layers that read the one before them.
        name = listed.values[read if value.producer is None else value.index]
        found.append(Redistribution(
            value=name, shape=value.spec.shape, dtype=value.spec.dtype, source=placements(layouts[0]),
            consumer=consumer, target=placements(layouts[-1]), multiplicity=edge.multiplicity,
            hops=_hops(value, layouts, mesh, answer, prices, gradient),
        ))
    return [*found, *_class_held(graph, mesh, answer, prices, listed)]


def _class_held(graph: PlacementGraph, mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, listed: UserNames,
                ) -> Iterator[Redistribution]:
    """One redistribution per class of parameters that are gathered once a step and stay unsharded."""
    told: set[int] = set()
    trained = graph.gradients
    for v, route in answer.decision.held.items():
        number = answer.problem.entities.of_input[v]
        if number in told or v not in trained:
            continue
        told.add(number)
        value, layouts = graph.values[v], [route.layout(k) for k in range(len(route.hops) + 1)]
        yield Redistribution(
            value=listed.values[v], shape=value.spec.shape, dtype=value.spec.dtype, source=placements(layouts[0]),
            consumer=next((graph.operations[i].name for i in value.users), ""), target=placements(layouts[-1]),
            multiplicity=answer.solved.entities[number].multiplicity, held=True,
            hops=_hops(value, layouts, mesh, answer, prices, False),
        )


def _end(graph: PlacementGraph, answer: MeshPlacement, listed: UserNames, edge: Edge) -> tuple[int, str] | None:
    """The value that a listed operation reads along an edge, directly or through shared copies, and the name of that operation;
    None if the edge ends at the graph's output or the optimizer."""
    if edge.target in listed.groups:
        (c,) = listed.groups[edge.target]
        v = c.inputs[edge.target_port]
        return v, next(graph.operations[i].name for i in c.operations if v in graph.operations[i].inputs)
    ends = (_end(graph, answer, listed, e) for e in answer.solved.edges
            if e.source == edge.target and answer.solved.entities[edge.target].kind in ("kept", "shared"))
    return next((end for end in ends if end is not None), None)


def _hops(value: Value, layouts: Sequence[Layout], mesh: Mesh, answer: MeshPlacement, prices: MeshPrices, gradient: bool,
          ) -> tuple[HopPlan, ...]:
    """One collective or slice per pair of consecutive layouts."""
    bucket_bytes = answer.problem.bucket_bytes if gradient else 0.0
    hops = []
    for layout, after in itertools.pairwise(layouts):
        (axis,) = [a for a in range(len(layout)) if layout[a] != after[a]]
        term = hop_term(value, layout, axis, after[axis], LocalSizes(answer.decision.axes), bucket_bytes)
        hops.append(_hop(term, mesh, prices, axis, answer.decision.axes[axis].compression))
    return tuple(hops)
