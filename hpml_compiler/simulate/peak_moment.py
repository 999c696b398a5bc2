"""Memory peak of a simulated step: bytes by part, and the node that runs then."""
from __future__ import annotations

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.memory_records import PARTS, Peak
from hpml_compiler.simulate.simulation import Simulation


def simulated_peak(plan: PlanContent, found: Simulation) -> Peak:
    """The memory peak of a simulation of the plan, on the fullest lane."""
    us = next(us for us, nbytes in found.memory if nbytes == found.peak_bytes)
    parts = {part: [nbytes for start, nbytes in curve if start <= us][-1] for part, curve in found.parts.items()}
    if parts:  # each part is rounded separately
        parts[max(parts, key=parts.__getitem__)] += found.peak_bytes - sum(parts.values())
    running = [event for event in found.events if event.lane == found.fullest_lane and event.stream == "compute"]
    event = max((each for each in running if each.start_us <= us), key=lambda each: each.start_us,
                default=running[0] if running else None)
    if event is None:
        return Peak(parts=parts, counted=False)
    node = event.name.split()[0]
    graph = next((each for each in plan.step_graphs if node in each.operations), None)
    block = graph.operations[node].block if graph else ""
    shown = [*PARTS, *(part for part in parts if part not in PARTS)]  # such as "held" of given stages
    return Peak(parts={part: parts[part] for part in shown if parts.get(part)}, graph=graph.name if graph else "", node=node,
                block=block, phase=event.kind, counted=False)
