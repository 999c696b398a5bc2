"""Simulate one step of a plan: step time and its parts, memory over time, energy."""
from hpml_compiler.simulate.simulation import Simulation
from hpml_compiler.simulate.simulator import simulate
from passes.pipeline.pipeline_timeline import TimedStage, pipeline_tasks
from passes.pipeline.schedule_orders import SCHEDULES
from passes.simulation.rank_lanes import CONTENTION
from passes.simulation.step_timeline import TimelineEvent

__all__ = ["CONTENTION", "SCHEDULES", "TimelineEvent", "Simulation", "TimedStage", "pipeline_tasks", "simulate"]
