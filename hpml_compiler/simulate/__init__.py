"""Simulate one step of a plan: what it takes, where the time goes, which bytes are held when, how much energy."""
from hpml_compiler.simulate.run import simulate
from hpml_compiler.simulate.simulation import Simulation
from passes.schedule.assembly import Event
from passes.schedule.lanes import CONTENTION
from passes.schedule.orders import SCHEDULES
from passes.schedule.pipeline import Stage, pipeline

__all__ = ["CONTENTION", "SCHEDULES", "Event", "Simulation", "Stage", "pipeline", "simulate"]
