"""Objective of a search: time or energy. Both are additive prices; an answer is priced in both."""
from __future__ import annotations

from dataclasses import replace
from typing import Literal

from passes.cost_model.cost_terms import Prices
from passes.cost_model.energy_model import EnergyPrices
from passes.hardware.mesh import Mesh
from passes.sharding.search.mesh_placement import MeshPlacement


def minimized_first(times: Prices, mesh: Mesh, objective: Literal["time", "energy"]) -> tuple[Prices, Prices]:
    """The prices that the solver minimizes, and the others: times in µs, and energy in µJ of one device."""
    energy = EnergyPrices(times, mesh)
    return (energy, times) if objective == "energy" else (times, energy)


def priced_in_time(answer: MeshPlacement, mesh: Mesh, objective: Literal["time", "energy"]) -> tuple[MeshPlacement, float]:
    """The answer with its cost in µs, and the energy of a step on all devices of the mesh, in joules."""
    assert answer.other_cost is not None, "answers are priced in both"
    time, energy = answer.cost, answer.other_cost
    if objective == "energy":
        time, energy = energy, time
    return replace(answer, cost=time), energy.step * 1e-6 * mesh.size
