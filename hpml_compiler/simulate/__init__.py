"""Simulate one step of a plan: what it takes, where the time goes, which bytes are held when, how much energy."""
from hpml_compiler.simulate.run import CONTENTION, simulate, simulated_peak_bytes
from hpml_compiler.simulate.schedules import SCHEDULES, Stage, pipeline
from hpml_compiler.simulate.simulation import Event, Simulation

__all__ = ["CONTENTION", "SCHEDULES", "Event", "Simulation", "Stage", "pipeline", "simulate", "simulated_peak_bytes"]
