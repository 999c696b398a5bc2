"""Discrete-event simulation of one step of a plan (`simulate`). For the model and its limits see docs/simulator.md."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hpml_compiler.optimizer_transient import transient_of
from hpml_compiler.options import Options
from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.peak_memory import fullest_moment
from hpml_compiler.simulate.memory_timeline import moments_of, with_memory, with_stage_memory
from hpml_compiler.simulate.plan_prices import PlannedPrices, PlanPrices, RepricedPlan
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.simulate.scheduled_stages import PP_AXIS, sends_us, stages_of, times_of_stages
from hpml_compiler.simulate.simulation import ESTIMATED, Simulation
from hpml_compiler.simulate.step_energy import above_idle_j
from passes.cost_model import CostModel
from passes.cost_model.cross_group_allreduce import sum_between_groups_j, sum_between_groups_us
from passes.cost_model.energy_model import Power
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import Mesh, mesh_from_pin
from passes.pipeline.pipeline_timeline import TimedStage, pipeline_tasks
from passes.pipeline.schedule_orders import ScheduleName
from passes.simulation.event_simulator import TaskSpans
from passes.simulation.rank_lanes import CONTENTION, RankLanes, one_lane, side_by_side
from passes.simulation.step_timeline import breakdown, events

MOST_MICROBATCHES = 4096


def simulate(
    plan: Plan | MixedPlan,
    cluster: Cluster | str | None = None,
    *,
    cost: CostModel | None = None,
    recompute: Literal["none", "full"] = "none",
    microbatches: int = 1,
    overlap: bool = True,
    contention: float | None = None,
    stages: Sequence[TimedStage] | None = None,
    schedule: Literal["gpipe", "1f1b"] = "1f1b",
    virtual_stages: int = 1,
) -> Simulation:
    """Simulate one step of `plan`. A mixed plan has a lane for each group of devices, idle groups included.

    cluster: None takes the plan's own predicted times; otherwise every operation and collective is priced for this cluster
    (a `Cluster`, or its text as for `hpml plan --cluster`). cost: cost model to use instead of that cluster's roofline.
    recompute: "full" recomputes forward of the repeated blocks (all of forward if there are none) in backward; "none"
    recomputes only as in the plan's activation checkpointing, if it has one.
    microbatches: number of times that forward and backward run, each on that part of the rows; gradients are reduced after the
    last. 1: as in the plan.
    overlap: False runs everything one after another, as a plan's `predicted` adds it up. contention: factor by which both
    streams slow down while both run, 1 to 2; None: `CONTENTION` by the device's kind. stages: times of each pipeline stage;
    the step then follows `schedule`, and the plan only gives the ranks (divided among the devices of the pipeline, in order)
    and their power. virtual_stages: stages per device, above 1 for interleaved 1F1B.

    Raises BadInput for a cluster of another size than the plan's, or options out of range.
    """
    if microbatches < 1:
        raise BadInput(f"microbatches must be at least 1, got {microbatches}", "simulate", "1 runs the whole batch at once")
    _check_microbatches(plan, microbatches)
    if recompute not in ("none", "full"):
        raise BadInput(f"recompute must be none or full, got {recompute!r}", "simulate", "write recompute=\"full\"")
    if contention is not None and not 1.0 <= contention <= 2.0:
        raise BadInput(f"contention must be from 1 (overlap is free) to 2 (it gains nothing), got {contention}", "simulate",
                       "remove it to use the default of the device")
    if isinstance(plan, MixedPlan):
        if stages is not None or cost is not None:
            raise BadInput("simulations of mixed plans support neither stages nor a cost model", "simulate",
                           "remove both arguments")
        built = _mixed(plan, cluster, recompute == "full", microbatches, overlap)
    elif stages is not None:
        built = _pipeline(plan, _mesh(plan, cluster), stages, microbatches, schedule, virtual_stages)
    elif any(graph.pipeline for graph in plan.step_graphs):
        built = _planned_pipeline(plan, _mesh(plan, cluster), cost, cluster is not None, recompute == "full", overlap,
                                  contention)
    else:
        built = _plan(plan, _mesh(plan, cluster), cost, cluster is not None, recompute == "full", microbatches, overlap)
    found = _simulation(built, built.run(contention))
    if stages is not None:
        return found
    if isinstance(plan, Plan) and any(graph.pipeline for graph in plan.step_graphs):
        graph = plan.step_graphs[0]
        is_counted = all(stage.kept for stage in graph.pipeline.stages) if graph.pipeline and graph.at_peak else False
        return with_stage_memory(found, graph) if is_counted else found
    # Groups of a mixed plan are on clusters of their own.
    plans, on = ([plan], cluster) if isinstance(plan, Plan) else ([group.plan for group in plan.groups], None)
    return with_memory(found, [
        _moments(each, _device_of(each, on), recompute == "full", microbatches) if each else [Peak()] for each in plans])


def peak_of_plan(plan: Plan) -> Peak:
    """The memory peak of a step of the plan, which is not pipelined: stages are counted when they are planned."""
    return fullest_moment(_moments(plan, _device_of(plan, None)))


def _moments(plan: Plan, device: str, recompute: bool = False, microbatches: int = 1) -> list[Peak]:
    return moments_of(plan.step_graphs, _update_bytes(plan, device), device, recompute, microbatches)


def _device_of(plan: Plan, cluster: Cluster | str | None) -> str:
    mesh = _mesh(plan, cluster)
    return mesh.device.kind if mesh else "cpu"


def _check_microbatches(plan: Plan | MixedPlan, count: int) -> None:
    """Check that `count` microbatches divide the known rows of every graph or group, and that there are not too many."""
    parts = [(f"the group {group.cluster}", group.rows) for group in plan.groups if group.plan] if isinstance(
        plan, MixedPlan) else [(f"graph {graph.name}", graph.rows) for graph in plan.step_graphs]
    own = {each.count for graph in plan.graphs if (each := graph.microbatches)} if isinstance(plan, Plan) else set()
    if count > 1 and own:
        raise BadInput(f"the plan has {max(own)} microbatches, but microbatches={count}", "simulate",
                       "remove the argument, or plan without microbatches")
    if not parts:
        raise BadInput("the plan has no graphs to simulate", "simulate",
                       "make it again with `hpml plan TARGET --save PLAN.json`")
    for name, rows in parts:
        if rows is not None and rows % count:
            fitting = [n for n in range(1, min(rows, 1024) + 1) if rows % n == 0]
            raise BadInput(f"{count} microbatches do not divide the {rows} rows of {name}", "simulate",
                           f"choose one of {', '.join(map(str, fitting[:12]))}{', ...' * (len(fitting) > 12)}")
    if count > MOST_MICROBATCHES:
        raise BadInput(f"{count} microbatches are more than the maximum of {MOST_MICROBATCHES:,}", "simulate",
                       "simulate fewer: the steady state repeats")


def _mixed(plan: MixedPlan, cluster: Cluster | str | None, recompute: bool, microbatches: int, overlap: bool) -> RankLanes:
    """Lanes of the groups in order; gradients are reduced over the groups that take part before their optimizers run."""
    whole = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if whole is not None and [group.size for group in whole.groups] != [group.devices for group in plan.groups]:
        raise BadInput(f"the plan's groups have {[group.devices for group in plan.groups]} devices, but those of {whole} have "
                       f"{[group.size for group in whole.groups]}", "simulate", "name a cluster with the same groups")
    known = whole or plan.known_cluster
    lanes: list[RankLanes] = []
    for number, group in enumerate(plan.groups):
        if group.plan is None:
            lanes.append(RankLanes.idle(group.devices, known.groups[number].device if known else None))
        else:
            own = Cluster((whole.groups[number],)) if whole else None
            lanes.append(_plan(group.plan, _mesh(group.plan, own), None, own is not None, recompute, microbatches, overlap))
    active = [number for number, group in enumerate(plan.groups) if group.plan is not None]
    sum_us = sum_between_groups_us(whole, active, plan.cross.bytes) if whole else plan.cross.predicted_us
    sum_j = sum_between_groups_j(known, active, plan.cross.bytes) if known else 0.0
    return side_by_side(lanes, active, sum_us, sum_j)


def _mesh(plan: Plan, cluster: Cluster | str | None) -> Mesh | None:
    """The plan's mesh on a cluster. With None, on the plan's own cluster, or None if that is not known here: the plan has
    the times anyway."""
    if cluster is None:
        known = plan.known_cluster
        return mesh_from_pin(plan.mesh, known) if known else None
    return mesh_from_pin(plan.mesh, Cluster.parse(cluster) if isinstance(cluster, str) else cluster)


def _plan(plan: Plan, mesh: Mesh | None, cost: CostModel | None, anew: bool, recompute: bool, microbatches: int,
          overlap: bool) -> RankLanes:
    """The lane of a plan without stages."""
    graphs = plan.step_graphs
    if cost is not None and mesh is None:
        raise BadInput("a cost model needs the mesh's links", "simulate", "give the cluster, too")
    states = _options(plan).optimizer_states
    prices: list[PlanPrices] = []
    for graph in graphs:
        model = RepricedPlan(graph, MeshPrices(mesh, states, cost=cost)) if mesh else None
        prices.append(model if model and (anew or cost is not None) else PlannedPrices(graph, model))
    steps = [step_graph(graph, each, 1.0 / microbatches, not recompute) for graph, each in zip(graphs, prices)]
    return one_lane(steps, ranks=plan.world_size, device=mesh.device if mesh else None, microbatches=microbatches,
                    recompute=recompute, overlap=overlap)


def _options(plan: Plan) -> Options:
    """The plan's options that determine the optimizer and the device of its state."""
    known = {name: plan.options[name] for name in ("optimizer", "offload") if name in plan.options}
    return Options.parse({name: value for name, value in known.items() if value != "saved"})  # "saved" needs a budget


def _update_bytes(plan: Plan, device: str) -> float:
    """Bytes of temporary tensors in the optimizer step."""
    trained = {name: each.bytes_per_device for graph in plan.step_graphs if graph.training
               for name, each in graph.parameters.items() if each.trainable}
    made = transient_of(_options(plan), device)
    return made.bytes_of(sum(trained.values()), max(trained.values(), default=0))


def _planned_pipeline(plan: Plan, mesh: Mesh | None, cost: CostModel | None, anew: bool, recompute: bool, overlap: bool,
                      contention: float | None) -> RankLanes:
    """Lanes of the pipeline stages in the plan."""
    graph, *others = plan.step_graphs
    if others:
        raise BadInput(f"only pipelines of one graph can be simulated, but the plan has {len(others)} more graphs", "simulate",
                       "remove the graph breaks (`hpml_compiler.last_plan()` names them by their frames)")
    if cost is not None and mesh is None:
        raise BadInput("a cost model needs the mesh's links", "simulate", "give the cluster, too")
    pipe, memory = graph.pipeline, graph.memory
    assert pipe is not None, "the caller checks it"
    own = MeshPrices(mesh, _options(plan).optimizer_states, cost=cost) if mesh else None
    model = RepricedPlan(graph, own) if own else None
    prices = model if model and (anew or cost is not None) else PlannedPrices(graph, model)
    slower = contention if contention is not None else CONTENTION[mesh.device.kind if mesh else "cpu"]
    times = times_of_stages(graph, [stage.operations for stage in pipe.stages], prices, recompute=recompute, overlap=overlap,
                            contention=slower)
    # The plan lists all parameters; the optimizer of the fullest rank steps over its own share of them.
    trained = sum(each.bytes_per_device for each in graph.parameters.values())
    optimizer_us = graph.predicted.optimizer_us if prices is not model else (
        prices.optimizer_us() * memory.parameters / trained if trained else 0.0)
    sends = sends_us(pipe, own) if own is not None and prices is model else None
    stages = stages_of(pipe, times, sends, optimizer_us, prices.accumulate_us())
    built = _pipeline(plan, mesh, stages, pipe.microbatches, pipe.schedule, pipe.virtual_stages)
    if mesh is None:
        return built
    return replace(built, above_idle_j=above_idle_j(
        pipe, [each.loop for each in times], [each.once for each in times], stages, prices.accumulate_us(), mesh, PP_AXIS))


def _pipeline(plan: Plan, mesh: Mesh | None, stages: Sequence[TimedStage], microbatches: int, schedule: ScheduleName,
              virtual: int) -> RankLanes:
    world, devices = plan.world_size, max(1, len(stages) // max(1, virtual))
    if virtual < 1 or (virtual > 1 and schedule == "gpipe"):
        raise BadInput(f"virtual_stages={virtual} does not fit the schedule {schedule}", "simulate",
                       "use 1f1b with virtual_stages of at least 1")
    if world % devices:
        raise BadInput(f"{world} ranks cannot be divided among {devices} pipeline devices", "simulate",
                       "choose a number of stages that divides the ranks of the plan")
    schedule = "interleaved" if virtual > 1 and schedule == "1f1b" else schedule
    built = pipeline_tasks(stages, microbatches, schedule, devices)
    each = world // devices
    ranks = [tuple(range(d * each, (d + 1) * each)) for d in range(devices)]
    kernels = ["" if not label.work else "pointwise" if label.kind == "optimizer" else "matmul" for label in built.labels]
    return RankLanes(built.tasks, built.labels, built.intervals, [{"held": nbytes} for nbytes in built.held_bytes], ranks,
                     [mesh.device if mesh else None] * devices, kernels, 0.0)


def _simulation(built: RankLanes, spans: TaskSpans) -> Simulation:
    parts = breakdown(built.tasks, built.labels, spans, [len(ranks) for ranks in built.ranks])
    curves = built.memory(spans)
    peaks = [max(nbytes for _, nbytes in curve) for curve in curves]
    lane = peaks.index(max(peaks))
    return Simulation(
        step_us=spans.end_us,
        compute_us=parts.compute_us,
        communication_us=parts.communication_us,
        exposed_communication_us=parts.exposed_communication_us,
        bubble_us=parts.bubble_us,
        optimizer_us=parts.optimizer_us,
        peak_bytes=peaks[lane],
        energy_j=_energy_j(built, spans),
        energy_label=ESTIMATED,
        events=events(built.tasks, built.labels, spans),
        memory=curves[lane],
        ranks_of_lane=tuple(built.ranks),
        fullest_lane=lane,
        parts=built.parts(spans, lane),
    )


def _energy_j(built: RankLanes, spans: TaskSpans) -> float | None:
    """Energy of the step in J: idle power for the whole step, power above idle of each kernel and collective for its time, and
    the links' energy; None if a device is not known."""
    powers = [Power.of(device) for device in built.devices if device is not None]
    if len(powers) < len(built.devices):
        return None
    micro_j = sum(power.idle_w * spans.end_us * len(ranks) for power, ranks in zip(powers, built.ranks))
    if built.above_idle_j is not None:
        return micro_j * 1e-6 + built.above_idle_j
    for task, kernel, label in zip(built.tasks, built.kernels, built.labels):
        for lane in task.lanes:
            power = powers[lane]
            moving_us = label.inside.exposed_us if kernel else task.us
            watt_us = (power.communication_w - power.idle_w) * moving_us
            if kernel:
                watt_us += (power.kernel_w(kernel) - power.idle_w) * (task.us - moving_us)
            micro_j += watt_us * len(built.ranks[lane])
    return micro_j * 1e-6 + built.link_j
