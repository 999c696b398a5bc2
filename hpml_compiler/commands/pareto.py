"""`hpml pareto TARGET`: time and energy of a step under power caps, and the Pareto-optimal plans."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hpml_compiler.cli_target import load_target
from hpml_compiler.commands._at_work import at_work
from hpml_compiler.instruments.energy_studies.pareto_front import Sweep
from hpml_compiler.units import parse_watts
from hpml_compiler.visualize.picture_files import check_picture
from passes.errors import BadInput, shortened
from passes.hardware.cluster import Cluster


def register(app: typer.Typer) -> None:
    app.command("pareto")(pareto)


def pareto(
    target: Annotated[str, typer.Argument(help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (model, batch).")],
    cluster: Annotated[str, typer.Option(help="NODESxDEVICES:DEVICE, as 8x8:h100-80g, or a JSON file.")],
    caps: Annotated[str | None, typer.Option(help="Watts per device, as 200,300,none; by default, steps of the busy "
                                             "power.")] = None,
    devices: Annotated[str | None, typer.Option(help="Device counts, as 2,4,8; by default all, half, a "
                                                "quarter and an eighth.")] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Pin an option by its name, else an axis (dp=2); repeatable."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Draw the front into this file (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every point as one JSON object.")] = False,
) -> None:
    """Plan TARGET for time and for energy, on every mesh, under every cap; show the Pareto front."""
    check_picture(save, "the front")
    options, watts, counts = _options(fix or []), _caps(caps), _counts(devices)
    with at_work() as progress:
        found = _sweep(target, cluster, options, watts, counts, progress)
    if as_json:
        print(json.dumps(found.to_json(), allow_nan=False))
    else:
        _print(found)
    if save is not None:
        from hpml_compiler.instruments.energy_studies.pareto_plot import draw

        draw(found, save, f"{target.rpartition(':')[2]} on {found.cluster}")


def _options(fixes: list[str]) -> Any:
    """Parse the options of --fix; swept options cannot be pinned. Raises BadInput."""
    from hpml_compiler.commands._fix_option import parse_fixes
    from hpml_compiler.options import Options

    given = parse_fixes(fixes)
    for name, instead in (("objective", "both are planned"), ("power_cap", "give --caps"), ("cluster", "give --cluster"),
                          ("plan", "leave it out")):
        if name in given:
            raise BadInput(f"{name} cannot be pinned here", f"--fix {name}=...", instead)
    return Options.parse(given)


def _caps(text: str | None) -> list[float | None] | None:
    try:
        return None if text is None else [
            None if part.strip() == "none" else parse_watts(part) for part in text.split(",")]
    except ValueError as error:
        raise BadInput(str(error), "--caps", "write 200,300 or 200,300,none") from error


def _counts(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BadInput(f"{shortened(repr(text))} is not a list of numbers", "--devices", "write 2,4,8") from error


def _sweep(target: str, cluster: str, options: Any, caps: list[float | None] | None, counts: list[int] | None,
           progress: Any) -> Sweep:
    progress("loading the model")
    from hpml_compiler.instruments.energy_studies.plan_sweep import sweep

    model, batch = load_target(target)
    return sweep(model, batch, Cluster.parse(cluster), options, caps=caps, counts=counts, progress=progress)


def _print(found: Sweep) -> None:
    """Print the front as a table, fastest plan first."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from hpml_compiler.visualize.formatting import format_joules, format_mesh, format_us
    from hpml_compiler.visualize.terminal import show

    table = Table(box=box.SIMPLE, pad_edge=False, title_justify="left")
    for name in ("devices", "mesh", "cap", "planned for", "step", "energy", "power each"):
        table.add_column(name, justify="left" if name in ("mesh", "planned for") else "right")
    for point in found.front:
        table.add_row(
            str(point.devices), format_mesh(point.mesh),
            "none" if point.power_cap_w is None else f"{point.power_cap_w:g} W", point.objective,
            format_us(point.step_time_s * 1e6), format_joules(point.energy_j), f"{point.power_w:.3g} W",
        )
    labels = ", ".join(dict.fromkeys(point.energy_label for point in found.points))
    missed = f", {len(found.missed)} plans do not fit" if found.missed else ""
    show(Group(Text(f"{len(found.front)} of {len(found.points)} plans on {found.cluster} are Pareto-optimal{missed}; energy is "
                    f"{labels}"), table))
