"""What the stages of a pipeline would take, from a plan of the whole model on the mesh of one stage.

The planner has no pipeline stages yet. So that steps measured on pipelines can be predicted all the same, the plan of all
layers on the ranks of one stage is cut evenly: every stage (virtual stage, where a device has several) takes the same
number of layers; what is outside of the layers (embedding, head, loss) goes to the last one. A layer's times are the
difference of two simulations of one microbatch, of the same plan with few layers and with more. Forward is run again
before backward where the row says so. After the last microbatch gradients are reduced, which nothing hides, and the
optimizer steps. Between stages goes the residual stream of a microbatch, a t-th of it per tensor-parallel rank
(Narayanan et al., arXiv 2104.04473, section 4.1), from node to node.
"""
from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from hpml_compiler.calibration.rows import Row
from hpml_compiler.plans.plan import Plan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.prices import Repriced
from hpml_compiler.simulate.step_graph import step_graph
from passes.costs.prices import MeshPrices
from passes.errors import BadInput
from passes.graph.phase import FORWARD
from passes.machine.cluster import Cluster
from passes.machine.mesh import mesh_from_pin
from passes.schedule.events import run
from passes.schedule.lanes import CONTENTION
from passes.schedule.pipeline import Stage, pipeline
from passes.schedule.walk import program

ADAM_STATES = 2
FEW, MORE = 4, 8
"""Layers of the two simulations whose difference is that of a layer."""


@dataclass(frozen=True)
class Times:
    """µs on one rank: of one microbatch forward, and backward (with what is recomputed); to reduce all gradients once."""

    forward_us: float
    backward_us: float
    reduce_us: float

    def plus(self, other: Times, factor: float = 1.0) -> Times:
        """self + factor · other, 0 where differences of what is equal leave less."""
        pairs = zip(astuple(self), astuple(other))
        return Times(*(max(0.0, mine + factor * theirs) for mine, theirs in pairs))


def pipeline_us(plan: Plan, cluster: Cluster, row: Row) -> float:
    """µs of a step of `row` on a pipeline; `plan` is of all layers on the mesh of one stage, `cluster` that of a stage."""
    assert row.pipeline is not None
    stages = stages_of(plan, cluster, row)
    built = pipeline(stages, row.microbatches, row.pipeline.schedule, row.pipeline.stages)
    return run(built.tasks, [CONTENTION[cluster.device.kind]] * row.pipeline.stages).end_us


def stages_of(plan: Plan, cluster: Cluster, row: Row) -> list[Stage]:
    """The (virtual) stages in order. Raises BadInput where the layers do not divide evenly."""
    pipe, (graph,) = row.pipeline, plan.step_graphs
    assert pipe is not None and row.arguments is not None
    chunks, layers = pipe.stages * pipe.virtual, depth(graph)
    if layers % chunks:
        raise BadInput(f"{layers} layers cannot be cut evenly into {chunks} (virtual) stages", row.name,
                       "give stages and virtual that divide the layers")
    mesh = mesh_from_pin(graph.mesh, cluster)
    prices = Repriced(graph, MeshPrices(mesh, ADAM_STATES))
    few, more = (_times(with_layers(graph, n), cluster, row) for n in (FEW, MORE))
    layer = Times(0.0, 0.0, 0.0).plus(more.plus(few, -1.0), 1 / (MORE - FEW))
    outside = few.plus(layer, -FEW)
    inside = _share_of_layers(graph)
    per_stage = layers // chunks
    found = []
    for chunk in range(chunks):
        last = chunk == chunks - 1
        times = outside.plus(layer, per_stage) if last else Times(0.0, 0.0, 0.0).plus(layer, per_stage)
        share = inside / chunks + (1.0 - inside if last else 0.0)
        found.append(Stage(times.forward_us, times.backward_us, _send_us(row, cluster), reduce_us=times.reduce_us,
                           optimizer_us=prices.optimizer_us() * share))
    return found


def depth(graph: GraphPlan) -> int:
    """Layers of the model that a shortened plan stands for. Raises BadInput for a plan that lists all layers."""
    found = max(graph.multiplicity.values(), default=1)
    if found <= MORE // 2:
        raise BadInput("the plan lists every layer: there is none that stands for all", graph.name,
                       "plan a model with a ModuleList of eight equal layers or more, without trace_all_layers")
    return found


def with_layers(graph: GraphPlan, layers: int) -> GraphPlan:
    """The plan with another number of layers: what runs a·depth + b times (|b| < depth / 2) runs a·layers + b times."""
    whole = depth(graph)

    def scaled(count: int) -> int:
        return max(1, count - round(count / whole) * (whole - layers))

    return graph.model_copy(update={
        "multiplicity": {name: scaled(count) for name, count in graph.multiplicity.items()},
        "redistributions": tuple(
            move.model_copy(update={"multiplicity": scaled(move.multiplicity)}) for move in graph.redistributions
        ),
    })


def _times(graph: GraphPlan, cluster: Cluster, row: Row) -> Times:
    """Gradients are reduced, and the optimizer steps, after the last microbatch, and what is held is gathered before the first:
    this is one of those between."""
    mesh = mesh_from_pin(graph.mesh, cluster)
    one = step_graph(graph, Repriced(graph, MeshPrices(mesh, ADAM_STATES)), 1.0 / row.microbatches)
    reduce_us = sum(hop.us * leg.multiplicity for leg in one.legs if leg.gradient for hop in leg.hops)
    legs = tuple(leg for leg in one.legs if not (leg.gradient or leg.once))
    made = program([replace(one, legs=legs, optimizer_us=0.0)], recompute=row.recompute == "full")
    spans = run(made.tasks(overlap=True), [CONTENTION[mesh.device.kind]])
    forward_us = max((spans.stop_us[i] for i, e in enumerate(made.entries) if e.kind == FORWARD), default=0.0)
    return Times(forward_us, spans.end_us - forward_us, reduce_us)


def _share_of_layers(graph: GraphPlan) -> float:
    """The part of the trained parameters' bytes that is in layers: their names have a number, as `layers.3.up.weight`."""
    sizes = {name: p.bytes_per_device for name, p in graph.parameters.items() if p.trainable}
    inside = sum(size for name, size in sizes.items() if any(part.isdigit() for part in name.split(".")))
    return inside / sum(sizes.values()) if sizes else 0.0


def _send_us(row: Row, cluster: Cluster) -> float:
    """The residual stream of one microbatch in two bytes an element, split over the ranks that share it."""
    a = row.arguments
    assert a is not None
    nbytes = 2.0 * a.batch * a.sequence * a.hidden / row.microbatches / math.prod(row.mesh.values())
    link = cluster.inter_node
    return link.latency_us + nbytes / link.device_bytes_per_s(cluster.devices_per_node) * 1e6


def stage_cluster(row: Row) -> Cluster:
    """The cluster that one stage of `row` has to itself; the whole one without a pipeline. Raises BadInput where a stage
    is no whole number of nodes."""
    cluster = Cluster.parse(row.cluster)
    if row.pipeline is None:
        return cluster
    group = cluster.group
    if group.nodes % row.pipeline.stages:
        raise BadInput(f"{group.nodes} nodes cannot be shared out among {row.pipeline.stages} stages", row.name,
                       "give each stage whole nodes")
    return replace(cluster, groups=(replace(group, nodes=group.nodes // row.pipeline.stages),))

