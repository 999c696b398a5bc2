"""Monitors of this process: one for all compiled graphs, and one for each pipelined training graph."""
from __future__ import annotations

import torch.distributed as dist

from hpml_compiler.energy.power_meter import PowerMeter
from hpml_compiler.monitor.monitor import PlanMonitor
from hpml_compiler.monitor.stage_monitor import StageMonitor, StagesReport, gathered, say
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.plan_assembly import step_peak_bytes, with_peak
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.device_clock import clock_for
from hpml_compiler.runtime.process.world_group import control_group
from hpml_compiler.session import session
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.pipeline.stage_assignment import StageAssignment


def monitor_of(options: Options) -> PlanMonitor:
    """The monitor of this process, created with the options of the first compiled graph."""
    current = session.current()
    if current.monitor is None:
        speaks, kind = dist.get_rank() == 0, device_type()
        current.monitor = PlanMonitor(kind, speaks=speaks, folder=options.tensorboard,
                                  power=PowerMeter.here(kind) if speaks else None, rival_us=lambda: rival_us(current),
                                  complete=lambda plan: with_peak(plan, current.options, current.cluster),
                                  peak_bytes=lambda plans: step_peak_bytes(plans, current.options, current.cluster))
    return current.monitor


def rival_us(made: session.Session) -> float | None:
    """Predicted µs by which the best plan on another mesh is slower, for the graph that chose the mesh; None if unknown. For a
    mesh whose search was cut off early, only a bound is known."""
    taken = next((graph.solver for graph in made.graphs if graph.training), None)
    others = [each.bound if each.cost is None else each.cost for each in made.rejected if each.objective == "time"]
    known = [each for each in others if each is not None]
    if taken is None or taken.cost is None or taken.objective != "time" or not known:
        return None
    return max(min(known) - taken.cost, 0.0)


def current_monitor() -> PlanMonitor | None:
    return session.current().monitor


def watch_of(name: str, table: PipelineSchedule, place: int, stages: StageAssignment, options: Options) -> StageMonitor:
    """A monitor of the calls of a graph that was split into these stages; place: this rank's coordinate on `pp`."""

    def done(report: StagesReport) -> None:
        session.current().stages_report = report
        if dist.get_rank() == 0:
            say(report, options.tensorboard)

    return StageMonitor(name, table, place, stages, clock_for(device_type()), lambda own: gathered(own, control_group()), done)
