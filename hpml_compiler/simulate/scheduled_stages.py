"""Stage times of a plan's pipeline, as input of the schedule simulation.

A stage is a subset of the plan's calls, with the number of times that it runs each, and the communication between its devices.
So its times follow from the prices of these on any cluster.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpml_compiler.plans.pipeline_records import PipelinePlan, StagePlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.plan_prices import PlanPrices
from hpml_compiler.simulate.plan_step_graph import step_graph
from hpml_compiler.simulate.step_energy import Activity
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.step_phase import FORWARD
from passes.pipeline.pipeline_timeline import TimedStage
from passes.simulation.event_simulator import simulate_tasks
from passes.simulation.rank_program import ProgramEntry
from passes.simulation.step_graph import StepGraph, Transfer, TransferHop
from passes.simulation.step_lowering import lower_step
from passes.simulation.step_timeline import EmbeddedCommunication

PP_AXIS = "pp"


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage in µs: forward and backward of one microbatch, without gradient accumulation, and the communication
    inside them. around_us, reduce_us: computation and communication done once in a step, before or after the loop over
    microbatches. loop, once: all of that, by kind of kernel, for one microbatch and once in a step."""

    forward_us: float
    backward_us: float
    around_us: float
    reduce_us: float
    forward_inside: EmbeddedCommunication
    backward_inside: EmbeddedCommunication
    loop: Activity = Activity()
    once: Activity = Activity()


def times_of_stages(graph: GraphPlan, operations: Sequence[Mapping[str, int]], prices: PlanPrices, *, recompute: bool = False,
                    overlap: bool = False, contention: float = 1.0) -> list[StageTimes]:
    """Times of each stage. operations: for each stage, the number of times that it runs each listed call for one microbatch.
    recompute: backward recomputes forward. overlap: the devices of a stage compute and communicate at the same time, both
    `contention` times slower."""
    step = step_graph(graph, prices)
    return [_times(step, own, len(operations), recompute, overlap, contention) for own in operations]


def _times(step: StepGraph, own: Mapping[str, int], stages: int, recompute: bool, overlap: bool, contention: float,
           ) -> StageTimes:
    calls = tuple(replace(call, runs=own[call.name]) for call in step.calls if own.get(call.name) and call.when == "loop")
    around = [(own[call.name], call) for call in step.calls if own.get(call.name) and call.when != "loop"]
    inside, once = list[Transfer](), list[tuple[float, TransferHop]]()
    for leg in step.legs:
        owner = step.by_name.get(leg.reader) or step.by_name.get(leg.value)
        here = leg.multiplicity * (1 / stages if owner is None else own.get(owner.name, 0) / owner.runs)
        if leg.gradient and not leg.each or leg.once or owner is None or owner.when != "loop":
            once += [(here, hop) for hop in leg.hops]
        elif here:
            inside.append(replace(leg, multiplicity=max(1, round(here))))
    alone = replace(step, calls=calls, legs=tuple(inside), optimizer_us=0.0, microbatches=1)
    made = lower_step([alone], recompute=recompute)
    spans = simulate_tasks(made.tasks(overlap), [contention])
    forward_us = max((stop for stop, each in zip(spans.stop_us, made.entries) if each.kind == FORWARD), default=0.0)
    before, after = [
        _inside(us, [each for stop, each in zip(spans.stop_us, made.entries) if (stop <= forward_us) == forward])
        for us, forward in ((forward_us, True), (spans.end_us - forward_us, False))]
    return StageTimes(forward_us, spans.end_us - forward_us, sum(runs * call.us for runs, call in around),
                      sum(runs * hop.us for runs, hop in once), before, after, Activity.of_entries(made.entries),
                      Activity.of_runs(around, once))


def _inside(us: float, entries: Sequence[ProgramEntry]) -> EmbeddedCommunication:
    """Communication inside a forward or backward that takes `us`: its total, and the exposed part."""
    work_us = sum(each.us for each in entries if each.is_work)
    return EmbeddedCommunication(sum(each.us for each in entries if not each.is_work), max(0.0, us - work_us))


def sends_us(pipe: PipelinePlan, prices: MeshPrices) -> list[tuple[float, float]]:
    """For each stage, the µs to send to the next and to the previous stage for one microbatch. prices: of a mesh with the axis
    `pp`."""
    axis = prices.mesh.names.index(PP_AXIS)

    def us(stage: StagePlan, backward: bool) -> float:
        return sum(prices.collective("send_recv", axis, each.bytes) for each in stage.sends if each.backward == backward)

    return [(us(stage, False), us(stage, True)) for stage in pipe.stages]


def stages_of(pipe: PipelinePlan, times: Sequence[StageTimes], sends: Sequence[tuple[float, float]] | None = None,
              optimizer_us: float = 0.0, accumulate_us: float = 0.0) -> list[TimedStage]:
    """Stages as the schedule simulation takes them. sends: send times to use instead of the plan's. optimizer_us,
    accumulate_us: time of the optimizer step, and of accumulating the gradients of one microbatch, on the rank with the most
    resident memory; other ranks take proportionally less."""
    held = [stage.resident_bytes for stage in pipe.stages]
    most = max(sum(nbytes for stage, nbytes in zip(pipe.stages, held) if stage.rank == rank) for rank in range(pipe.ranks))
    found = []
    for k, (stage, own) in enumerate(zip(pipe.stages, times, strict=True)):
        share = held[k] / most if most else 0.0
        once_us = share * accumulate_us * (pipe.microbatches - 1) + stage.again_us
        backward_us = own.backward_us + once_us / pipe.microbatches
        send_us, return_us = (stage.send_us, stage.return_us) if sends is None else sends[k]
        found.append(TimedStage(
            own.forward_us, backward_us, send_us, return_us, reduce_us=own.reduce_us, around_us=own.around_us,
            optimizer_us=optimizer_us * share, activation_bytes=stage.saved_bytes, held_bytes=held[k],
            weight_us=None if stage.weight_us is None else backward_us * _share(stage.weight_us, stage.backward_us),
            forward_inside=own.forward_inside, backward_inside=own.backward_inside))
    return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
