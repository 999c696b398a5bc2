"""A simulation as a table for a rich console: parts of the step time, then memory and energy."""
from __future__ import annotations

from collections import defaultdict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpml_compiler.plan_api.mixed_plan import MixedPlan
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.simulate.simulation import Simulation
from hpml_compiler.visualize.formatting import format_bytes, format_mesh, format_us
from hpml_compiler.visualize.terminal import labelled


def renderable(plan: Plan | MixedPlan, simulation: Simulation, cluster: str | None = None) -> RenderableType:
    """The table for a rich console. cluster: the one that the plan was simulated on, if it is not the plan's own."""
    s, lanes = simulation, len(simulation.ranks_of_lane)
    where = cluster or plan.cluster or "the cluster of the plan"
    ranks = f"{sum(map(len, s.ranks_of_lane))} ranks in {lanes} lane{'s' * (lanes > 1)}"
    lines = {"collectives": f"{format_us(s.communication_us)}, of which {format_us(s.exposed_communication_us)} exposed",
             "memory": f"peak {format_bytes(s.peak_bytes)} on a device, {format_bytes(s.memory[0][1])} at the start"}
    if s.energy_j is not None:
        lines["energy"] = f"{s.energy_j:.4g} J a step on all devices ({s.energy_label})"
    lines["plan"] = f"{format_us(plan.predicted.step_time_us)} a step predicted without overlap"
    what = f"mesh {format_mesh(plan.mesh)}" if isinstance(plan, Plan) else f"{plan.batch} rows over all groups"
    return Group(Text(f"{what} on {where}: {ranks}, {format_us(s.step_us)} a step simulated"),
                 _parts(s), _events(s), *(labelled(label, line) for label, line in lines.items()))


def _parts(s: Simulation) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("part of the step")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for name, us in (("compute", s.compute_us), ("exposed communication", s.exposed_communication_us),
                     ("bubble", s.bubble_us), ("optimizer", s.optimizer_us), ("step", s.step_us)):
        table.add_row(name, format_us(us), f"{us / s.step_us:.1%}" if s.step_us else "")
    return table


def _events(s: Simulation) -> Table:
    """Number and total duration of a rank's events by kind."""
    counts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    total = sum(map(len, s.ranks_of_lane))
    for event in s.events:
        share = len(s.ranks_of_lane[event.lane]) / total
        row = counts[event.stream, event.kind]
        row[0] += share
        row[1] += share * (event.stop_us - event.start_us)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("stream")
    table.add_column("kind")
    table.add_column("runs/rank", justify="right")
    table.add_column("busy time", justify="right")
    for (stream, kind), (runs, us) in sorted(counts.items(), key=lambda item: (item[0][0] != "compute", -item[1][1])):
        table.add_row(stream, kind, f"{runs:.4g}", format_us(us))
    return table
