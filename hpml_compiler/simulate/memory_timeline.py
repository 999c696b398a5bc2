"""Memory of a step of a plan: at each operation in program order, at its peak, and over simulated time."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpml_compiler.plans.memory_records import PARTS, Peak
from hpml_compiler.plans.peak_memory import GraphTimeline, counted_timeline, peak_of_stages, stage_moments, step_moments
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.plan_prices import PlannedPrices
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.simulate.simulation import Simulation
from passes.graph.step_phase import FORWARD
from passes.simulation.memory.memory_breakdown import phase_moments
from passes.simulation.memory.memory_trace import MemoryTrace
from passes.simulation.memory.phase_timeline import PhaseTimeline
from passes.simulation.memory.step_trace import trace_step
from passes.simulation.rank_program import OPTIMIZER, RECOMPUTE

Key = tuple[str, str, str]
"""(graph, phase, operation)."""


def moments_of(graphs: Sequence[GraphPlan], update_bytes: float, device: str, recompute: bool = False,
               microbatches: int = 1) -> list[Peak]:
    """Bytes by part wherever they change in a step of these graphs, which are not pipelined; see `step_moments`. device: type
    of the device. recompute, microbatches: as in `hpml_compiler.simulate.simulate`."""
    planned = not recompute and microbatches == 1
    timelines = [
        counted_timeline(graph, graph.kept) if planned and graph.kept is not None and graph.training
        else _timeline(graph, trace_step(step_graph(graph, PlannedPrices(graph), 1.0 / microbatches, not recompute), device,
                                         recompute, microbatches))
        for graph in graphs]
    if any(each.step_bytes is None for each in timelines):
        timelines = [replace(each, step_bytes=None) for each in timelines]
    counted = bool(timelines) and timelines[0].step_bytes is not None
    moments = step_moments(graphs, timelines, update_bytes)
    return moments if counted else [moment.model_copy(update={"counted": False}) for moment in moments]


def _timeline(graph: GraphPlan, trace: MemoryTrace) -> GraphTimeline:
    program = trace.program
    return GraphTimeline(
        _moments(graph, trace, trace.forward), _moments(graph, trace, trace.backward),
        program.microbatches.in_flight * program.bytes_of(trace.saved | program.returned), program.bytes_of(program.gradients))


def _moments(graph: GraphPlan, trace: MemoryTrace, phase: PhaseTimeline) -> tuple[Peak, ...]:
    name = "backward" if phase is trace.backward else "forward"
    return tuple(Peak(parts=dict(each.parts), graph=graph.name, node=each.name, block=each.block,
                      phase=RECOMPUTE if each.again else name) for each in phase_moments(trace, phase))


def with_memory(found: Simulation, lanes: Sequence[Sequence[Peak]]) -> Simulation:
    """The simulation of a plan with these bytes. lanes: moments of a step in program order on each lane; the first is what is
    in memory all the time. An operation that is not simulated by name counts with the one before it, so the peak is the same.
    """
    fullest = [max((moment.bytes for moment in moments), default=0) for moments in lanes]
    lane = fullest.index(max(fullest))
    moments = lanes[lane]
    runs = [*_runs(found, lane, {moment.graph for moment in moments if moment.graph})]
    points = [(0.0, moments[0]), *_points(runs, moments[1:]), (found.step_us, moments[0])]
    curve: list[tuple[float, Peak]] = []
    for us, moment in points:
        if curve and curve[-1][0] == us and us < found.step_us:
            moment = _fuller(curve.pop()[1], moment)
        curve.append((us, moment))
    parts = [part for part in PARTS if any(moment.parts.get(part) for _, moment in curve)]
    return replace(
        found, peak_bytes=fullest[lane], memory=tuple((us, moment.bytes) for us, moment in curve), fullest_lane=lane,
        parts={part: tuple((us, moment.parts.get(part, 0)) for us, moment in curve) for part in parts})


def with_stage_memory(found: Simulation, graph: GraphPlan) -> Simulation:
    """The simulation of a pipelined plan whose stages' activation checkpointing was decided under a memory budget: the fullest
    rank has the peak of each stage's forward and backward while that runs for a microbatch."""
    pipe, peak = graph.pipeline, graph.at_peak
    assert pipe is not None and peak is not None, "the caller checks it"
    state = {part: peak.parts.get(part, 0) for part in ("parameters", "optimizer", "copies")}
    lanes: list[list[Peak]] = [[Peak()] for _ in range(pipe.ranks)]
    for rank in range(pipe.ranks):
        own = {number: stage.kept for number, stage in enumerate(pipe.stages) if stage.rank == rank and stage.kept is not None}
        if not own or peak_of_stages(graph, list(own.values()), state).bytes != peak.bytes:
            continue
        stages, optimizer = stage_moments(graph, list(own.values()), state)
        lanes[rank] = [Peak(parts=state, phase="start")]
        for event in found.events:
            number = event.name.rpartition(" of stage ")[2]
            if event.lane == rank and event.stream == "compute" and number.isdecimal():
                forward, backward = stages[list(own).index(int(number))]
                moment = forward if event.kind == FORWARD else backward
                lanes[rank].append(moment.model_copy(update={"phase": event.kind, "node": event.name}))
        lanes[rank].append(optimizer)
    return with_memory(found, lanes)


def _runs(found: Simulation, lane: int, graphs: set[str]) -> Iterator[tuple[Key, float]]:
    """Computations of the lane, with their starts. Each graph begins with the overhead of its call."""
    graph = next(iter(graphs)) if len(graphs) == 1 else ""
    for event in found.events:
        if event.lane == lane and event.stream == "compute":
            first, _, rest = event.name.partition(" ")
            graph = rest if first == "call" and rest in graphs else graph
            yield ("", OPTIMIZER, OPTIMIZER) if event.kind == OPTIMIZER else (graph, event.kind, event.name), event.start_us


def _points(runs: Sequence[tuple[Key, float]], moments: Sequence[Peak]) -> Iterator[tuple[float, Peak]]:
    known: dict[Key, Key] = {}
    for (graph, phase, name), _ in runs:
        known[graph, phase, name] = graph, phase, name
        known.setdefault((graph, phase, name.split()[0]), (graph, phase, name))  # the first of the layers of a listed call
    keys = [known.get((moment.graph, moment.phase, moment.node)) for moment in moments]
    first: dict[tuple[str, bool], Key] = {}  # of each graph's forward and backward, what is simulated first
    for key in keys:
        if key is not None:
            first.setdefault((key[0], key[1] == FORWARD), key)
    current: Key | None = next(iter(first.values()), None)
    at: dict[Key, Peak] = {}
    for key, moment in zip(keys, moments):
        current = key or first.pop((moment.graph, moment.phase == FORWARD), current)
        if current is None:  # nothing is simulated by name
            yield 0.0, moment
        else:
            at[current] = _fuller(at[current], moment) if current in at else moment
    yield from ((us, at[key]) for key, us in runs if key in at)


def _fuller(one: Peak, other: Peak) -> Peak:
    return other if other.bytes > one.bytes else one
