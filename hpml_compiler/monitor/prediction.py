"""Predicted time, memory and energy of one step, from the plans of the graphs that it ran."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpml_compiler.monitor.kernel_classes import CLASSES, class_of_kind
from hpml_compiler.plans.schema import GraphPlan, MemoryBytes, Redistribution

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class GraphRuns:
    """Number of forward and backward calls of a graph, given by its number in the run, in one step."""

    graph: int
    forward: int
    backward: int


@dataclass(frozen=True)
class GraphCost:
    """Predicted costs of one graph: µs of a forward and of a backward call by class of work, without overlap.

    graph_us: both calls together, with overlap. optimizer_us: by parameter, since graphs may share parameters. energy_j: energy
    of a step of this graph alone on all devices; None if not known.
    """

    name: str
    training: bool
    forward_us: Mapping[str, float]
    backward_us: Mapping[str, float]
    graph_us: float
    optimizer_us: Mapping[str, float]
    energy_j: float | None

    def calls_us(self, runs: GraphRuns) -> float:
        """Predicted time of these calls, in µs."""
        forward, backward = sum(self.forward_us.values()), sum(self.backward_us.values())
        if not forward + backward:
            return 0.0
        return self.graph_us * (runs.forward * forward + runs.backward * backward) / (forward + backward)


@dataclass(frozen=True)
class PredictedStep:
    """Prediction for one step: its time in µs, in total and by class (with every class as a key), bytes by part and at the
    peak, and the energy of all devices in J (in proportion to the calls' time; None if that of a graph is not known)."""

    step_us: float
    classes_us: Mapping[str, float]
    peak_bytes: int
    parts_bytes: Mapping[str, int]
    energy_j: float | None


def graph_cost(plan: GraphPlan) -> GraphCost:
    forward: defaultdict[str, float] = defaultdict(float)
    backward: defaultdict[str, float] = defaultdict(float)
    for operation in plan.operations.values():
        side = backward if operation.backward else forward
        side[class_of_kind(operation.kind)] += operation.predicted_us * plan.runs(operation)
    if plan.kept is not None:
        for name, call in plan.kept.again.items():
            listed = plan.operations.get(name)
            backward["pointwise" if listed is None else class_of_kind(listed.kind)] += call.predicted_us * call.layers
        backward["pointwise"] += plan.kept.offload_us  # copies
    for move in plan.redistributions:
        side = backward if _is_backward(plan, move) else forward
        for hop in move.hops:  # a hop without bytes is local, such as a slice
            side["collective" if hop.bytes else "pointwise"] += hop.predicted_us * move.multiplicity
    sides = [forward, backward] if plan.training else [forward]
    for side in sides:
        side["overhead"] += plan.predicted.overhead_us / len(sides)
    trained = {name: p.bytes_per_device for name, p in plan.parameters.items() if p.trainable} if plan.training else {}
    total = sum(trained.values()) or 1
    return GraphCost(
        name=plan.name, training=plan.training, forward_us=dict(forward), backward_us=dict(backward),
        graph_us=max(plan.predicted.step_time_us - plan.predicted.optimizer_us, 0.0),
        optimizer_us={name: plan.predicted.optimizer_us * size / total for name, size in trained.items()},
        energy_j=plan.predicted.energy_j,
    )


def _is_backward(plan: GraphPlan, move: Redistribution) -> bool:
    """True if a redistribution is part of backward: its reader is or, at the graph's end, its value is no result of forward."""
    reader = plan.operations.get(move.consumer)
    if reader is not None:
        return reader.backward
    maker = plan.operations.get(move.value)
    return plan.training and (maker is None or maker.backward)


def peak_bytes_alone(plans: Sequence[GraphPlan]) -> int:
    """Peak bytes of the one graph whose step has most, as if each ran alone."""
    return max((plan.memory.peak for plan in plans), default=0)


def expected(plans: Sequence[GraphPlan], costs: Sequence[GraphCost], runs: Sequence[GraphRuns],
             peak_bytes: Callable[[Sequence[GraphPlan]], int] = peak_bytes_alone) -> PredictedStep:
    """Predict a step that ran these graphs: their calls, and one optimizer step over all parameters whose gradients were
    computed. peak_bytes: counts the peak of a step of several graphs."""
    classes: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    optimizer: dict[str, float] = {}
    step_us = 0.0
    for run in runs:
        cost = costs[run.graph]
        step_us += cost.calls_us(run)
        for side, count in ((cost.forward_us, run.forward), (cost.backward_us, run.backward)):
            for name, us in side.items():
                classes[name] += us * count
        if run.backward:
            optimizer.update(cost.optimizer_us)
    classes["optimizer"] = sum(optimizer.values())
    trained = [run for run in runs if run.backward] or list(runs)
    graphs = [plans[run.graph] for run in trained]
    parts = expected_parts(graphs, peak_bytes(graphs))
    if len(trained) == 1 and trained[0].forward > 1:
        # From the second call on, all gradients are in memory.
        plan = plans[trained[0].graph]
        parts["activations"] += plan.memory.gradients - (plan.at_peak.parts.get("gradients", 0) if plan.at_peak else 0)
    joules = [_joules(costs[run.graph], run) for run in runs]
    known = [each for each in joules if each is not None]
    return PredictedStep(step_us + classes["optimizer"], classes, sum(parts.values()), parts,
                         sum(known) if len(known) == len(joules) else None)


def _joules(cost: GraphCost, runs: GraphRuns) -> float | None:
    return None if cost.energy_j is None or not cost.graph_us else cost.energy_j * cost.calls_us(runs) / cost.graph_us


def expected_parts(plans: Sequence[GraphPlan], peak_bytes: int) -> dict[str, int]:
    """Predicted bytes by part of the graphs of one step; a parameter that several of them use counts once. `activations`: saved
    activations and temporary values, the rest of the step's peak."""
    parts: dict[str, float] = dict.fromkeys(MEMORY_PARTS, 0.0)
    seen: set[str] = set()
    for plan in plans:
        here = {name: p.bytes_per_device for name, p in plan.parameters.items()}
        total = sum(here.values())
        new = sum(size for name, size in here.items() if name not in seen) / total if total else 1.0
        seen.update(here)
        for part, size in _held(plan.memory).items():
            parts[part] += size * new
    found = {part: round(size) for part, size in parts.items()}
    return {**found, "activations": max(peak_bytes - sum(found.values()), 0)}


def _held(memory: MemoryBytes) -> dict[str, int]:
    return {part: getattr(memory, part) for part in MEMORY_PARTS if part != "activations"}
