"""Objective of a search: time, energy, or energy above that of idle devices, for the bound of a step. All are additive prices;
an answer is priced in time and in energy."""
from __future__ import annotations

from dataclasses import replace
from typing import Literal

from passes.cost_model.cost_terms import Prices
from passes.cost_model.energy_model import EnergyPrices
from passes.hardware.mesh import Mesh
from passes.sharding.search.mesh_placement import MeshPlacement

SearchObjective = Literal["time", "energy", "above_idle"]


def minimized_first(times: Prices, mesh: Mesh, objective: SearchObjective) -> tuple[Prices, Prices]:
    """The prices that the solver minimizes, and the others: times in µs, and energy in µJ of one device."""
    energy = EnergyPrices(times, mesh, above_idle=objective == "above_idle")
    return (times, energy) if objective == "time" else (energy, times)


def priced_in_time(answer: MeshPlacement, mesh: Mesh, objective: SearchObjective) -> tuple[MeshPlacement, float]:
    """The answer with its cost in µs, and the energy of a step on all devices of the mesh, in joules."""
    assert answer.other_cost is not None, "answers are priced in both"
    time, energy = answer.cost, answer.other_cost
    if objective != "time":
        time, energy = energy, time
    return replace(answer, cost=time), energy.step * 1e-6 * mesh.size
