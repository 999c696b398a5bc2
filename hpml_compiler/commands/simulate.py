"""`hpml simulate PLAN.json`: predicted time, its breakdown, and memory of one step of a saved plan."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from passes.filesystem.text_files import check_writable, write_file


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


def simulate(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan that `hpml plan --save` wrote.")],
    cluster: Annotated[str | None, typer.Option(
        help="Compute costs for NODESxDEVICES:DEVICE instead, as 8x8:h100-80g, or a JSON file.")] = None,
    recompute: Annotated[Literal["none", "full"], typer.Option(
        help="full: recompute the blocks' forward in backward.")] = "none",
    microbatches: Annotated[int, typer.Option(help="Number of microbatches.")] = 1,
    overlap: Annotated[bool, typer.Option(help="Overlap computation and collectives.")] = True,
    contention: Annotated[float | None, typer.Option(
        help="Slowdown of both while they overlap, 1 to 2 (default: by the device).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Draw the timeline into this file (.png, .svg, .pdf).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace that opens in ui.perfetto.dev to this file.")] = None,
) -> None:
    """Simulate one step of a saved plan: print the table, or with --json one object."""

    for each, what in ((timeline, "the timeline"), (trace, "the trace")):
        check_writable(each, what)
    from hpml_compiler.plan_api.mixed_plan import MixedPlan
    from hpml_compiler.plan_api.model_plan import Plan
    from hpml_compiler.plans.plan_json import is_mixed, read_plan
    from hpml_compiler.simulate import simulate as run

    text = read_plan(path)
    plan = (MixedPlan if is_mixed(text) else Plan).from_json(text, where=str(path))
    found = run(plan, cluster, recompute=recompute, microbatches=microbatches, overlap=overlap,
                contention=contention)
    if trace is not None:
        from hpml_compiler.simulate.chrome_trace import trace_json

        write_file(trace, trace_json(found), "the trace")
    if timeline is not None:
        from hpml_compiler.simulate.timeline_plot import draw

        what = ", ".join(g.name for g in plan.step_graphs) if isinstance(plan, Plan) else f"{plan.batch} rows"
        draw(found, timeline, f"{what} on {cluster or plan.cluster or 'its cluster'}")
    if as_json:
        print(json.dumps(found.summary(), allow_nan=False))
    else:
        _print_table(plan, found, cluster)


def _print_table(plan: Any, found: Any, cluster: str | None) -> None:
    from hpml_compiler.simulate.simulation_table import renderable
    from hpml_compiler.visualize.terminal import show

    show(renderable(plan, found, cluster))
