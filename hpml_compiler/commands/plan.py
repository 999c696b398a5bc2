"""`hpml plan TARGET`: plan a model for a cluster and predict the cost of a step, without any device."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hpml_compiler.cli_target import load_target
from hpml_compiler.commands._at_work import at_work
from hpml_compiler.visualize.picture_files import check_picture
from passes.errors import BadInput, Infeasible, MissingDependency, shortened
from passes.filesystem.text_files import check_writable


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    target: Annotated[str, typer.Argument(help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (model, batch).")],
    cluster: Annotated[
        str | None, typer.Option(help="NODESxDEVICES:DEVICE, as 8x8:h100-80g, several joined by +, or a JSON file.")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Pin an option by its name, else an axis (dp=2); repeatable."),
    ] = None,
    memory_budget: Annotated[str | None, typer.Option(help="Per device: 64MiB, 24GB, 80%.")] = None,
    solver: Annotated[str | None, typer.Option(help="Name of a PuLP solver.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Planning budget in seconds of counted work.")] = None,
    gap: Annotated[float | None, typer.Option(help="Relative optimality gap at which the solver may stop.")] = None,
    run_breaks: Annotated[bool, typer.Option(
        "--run-breaks", help="Run Python code between the graphs of a model that breaks, on its real weights.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Exit with 0 if part of the step could not be planned.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the plan into this file (.svg, .png, .pdf).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the plan as one page to this HTML file.")] = None,
    view: Annotated[str | None, typer.Option(
        help="Picture of --svg: overview (the default), block or operators.")] = None,
    block: Annotated[str | None, typer.Option(help="Module that the view block draws; by default the costliest.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Draw backward in the view block, too.")] = False,
) -> None:
    """Plan TARGET for a cluster: print the table, or with --json one object."""
    flags = {"cluster": cluster, "memory_budget": memory_budget, "solver": solver, "time_limit": time_limit, "gap": gap}
    options = checked_options(fix or [], {name: value for name, value in flags.items() if value is not None})
    check_writable(save, "the plan")
    check_picture(svg, "the plan")
    check_writable(html, "the page of the plan")
    drawn = _picture_options(svg, view, block, backward)
    try:
        with at_work() as progress:
            found = _make(target, {**options, "run_breaks": True} if run_breaks else options, progress)
    except Infeasible as error:
        if error.plan is not None and (svg or html):
            _draw_refused(error.plan, html, svg, drawn)
        raise
    if save is not None:
        found.save(save)
    if as_json:
        print(json.dumps({**found.summary_json(), **_memory(found)}, allow_nan=False))
    else:
        _print_table(found)
    _draw(found, html, svg, drawn)
    if not partial and (unplanned := [part for part in getattr(found, "unplanned", ()) if part.used]):
        count = sum(len(part.parameters) for part in unplanned)
        raise Infeasible(f"{count} parameters of the model are not in the plan: {unplanned[0].reason}",
                         unplanned[0].where or target, "give --run-breaks, if the weights are real, or --partial")


def _draw(found: Any, html: Path | None, svg: Path | None, drawn: dict[str, Any]) -> None:
    if html is not None:
        _write_page(found, html)
    if svg is not None:  # last: it fails where the program dot is missing
        found.render(svg, **drawn)


def _draw_refused(found: Any, html: Path | None, svg: Path | None, drawn: dict[str, Any]) -> None:
    """Draw a plan that does not fit, to show what takes the memory; a missing program is said beside the refusal."""
    try:
        _draw(found, html, svg, drawn)
    except MissingDependency as missing:
        typer.echo(f"hpml: {missing.what}", err=True)
    else:
        typer.echo(f"hpml: {', '.join(str(path) for path in (html, svg) if path)} shows the plan that does not fit", err=True)


def _write_page(found: Any, path: Path) -> None:
    from hpml_compiler.pages.plan_page import write_page
    from hpml_compiler.plan_api.model_plan import Plan

    if not isinstance(found, Plan):
        raise BadInput("a plan for groups of different devices has no page", "--html", "plan one group, or give --svg")
    write_page(found, path, ["hpml", *sys.argv[1:]])


VIEWS = ("overview", "block", "operators")


def _picture_options(svg: Path | None, view: str | None, block: str | None, backward: bool) -> dict[str, Any]:
    """Options of the picture. Raises BadInput before slow work for an unknown view, and for options without a picture."""
    if view is not None and view not in VIEWS:
        raise BadInput(f"there is no view {shortened(view)}", "--view", f"the views are {', '.join(VIEWS)}")
    given = {"view": view, "block": block, "backward": backward or None}
    options = {name: value for name, value in given.items() if value is not None}
    if options and svg is None:
        raise BadInput(f"--{next(iter(options))} needs a picture", "plan", "give --svg FILE.svg, too")
    return options


def checked_options(fixes: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Merge and validate the options of --fix and of the flags, before anything slow starts. Raises BadInput."""
    from hpml_compiler.commands._fix_option import parse_fixes
    from hpml_compiler.options import Options

    fixed = parse_fixes(fixes)
    if twice := sorted(set(fixed) & set(flags)):
        where = f"--fix {twice[0]}=... and --{twice[0].replace('_', '-')}"
        raise BadInput(what=f"{', '.join(twice)} is given twice", where=where, next_step="leave one of them out")
    options = {**fixed, **flags}
    Options.parse(options)
    return options


def _make(target: str, options: dict[str, Any], progress: Any) -> Any:
    progress("loading the model")
    from hpml_compiler import api

    model, batch = load_target(target)
    progress("planning")
    rest = dict(options)
    return api.plan(model, batch, cluster=rest.pop("cluster", None), **rest)


def peak_of(found: Any) -> Any:
    """Memory peak of a plan; counted now if the plan, written by hand, has none."""
    from hpml_compiler.simulate.simulator import peak_of_plan

    return found.peak or peak_of_plan(found)


def _memory(found: Any) -> dict[str, Any]:
    """Memory entries of the JSON output, for a plan for like devices."""
    from hpml_compiler.plan_api.model_plan import Plan
    from hpml_compiler.visualize.description.copies_memory import copy_bytes, low_rank_bytes
    from hpml_compiler.visualize.memory_explanation import memory_json

    if not isinstance(found, Plan) or not found.graphs:
        return {}
    return {"memory": memory_json(found, peak_of(found)), "copies_bytes": copy_bytes(found),
            "low_rank_bytes": low_rank_bytes(found)}


def _print_table(found: Any) -> None:
    from hpml_compiler.plan_api import mixed_table
    from hpml_compiler.plan_api.mixed_plan import MixedPlan
    from hpml_compiler.visualize import plan_table
    from hpml_compiler.visualize.terminal import show

    show(mixed_table.renderable(found) if isinstance(found, MixedPlan) else plan_table.renderable(found))
