"""`hpml demo`: run one training script on two ranks and on one; show the plan and both loss curves."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_compiler.commands._checks import check_compiler
from hpml_compiler.demo import loss_plot, training_runs
from hpml_compiler.demo.training_runs import TrainingRun
from passes.errors import BadInput, HpmlError, MissingDependency
from passes.filesystem.text_files import make_folder
from passes.hardware.control_groups import available_cores

if TYPE_CHECKING:
    from rich.console import Console


AGREE = 1e-4  # relative difference of losses that rounding explains after these steps
FILES = ("plan.json", "plan.svg", "plan.gv", "loss.png")  # plan.gv only if the .svg cannot be drawn
ROWS = 6  # in the table of losses


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for plan.json, plan.svg and loss.png.")] = Path(),
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Ranks of the distributed run.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 40,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT.")] = 6,
    width: Annotated[int, typer.Option(min=64, help="Width of the GPT, a multiple of 64.")] = 384,
    eager: Annotated[bool, typer.Option("--eager", help="Run without inductor, which needs a C++ compiler.")] = False,
) -> None:
    """Train a small GPT with one script on several ranks and on one, and compare the losses.

    Both runs use the CPU, one after the other: one thread for each of several ranks, or all their threads for the one
    rank, so that both have the same cores.
    """
    from rich.console import Console


    console = Console(highlight=False, soft_wrap=True)
    compiler = check_compiler()
    if compiler.status != "ok" and not eager:
        console.print(f"running without inductor: {compiler.detail} ({compiler.next_step})", markup=False)
        eager = True
    if width % 64:
        raise BadInput(f"{width} is not a multiple of 64, the size of a head", "--width",
                       f"use {64 * round(width / 64)}")
    make_folder(out)
    for name in FILES:
        (out / name).unlink(missing_ok=True)  # an older file would look like this run's
    plan_path = out / "plan.json"
    arguments = [f"--steps={steps}", f"--layers={layers}", f"--width={width}"]
    if eager:
        arguments.append('--options={"compiler": "eager"}')
    with _progress(console, steps) as stage:
        def first(step: int, loss: float) -> None:
            if step == 1:
                _show_plan(console, plan_path)

        many = training_runs.run_training(ranks, arguments, {"HPML_SAVE_PLAN": str(plan_path.resolve())},
                                          stage(ranks, training_runs.SCRIPT, first))
        together = {"OMP_NUM_THREADS": str(min(ranks, available_cores()))}
        one = training_runs.run_training(1, arguments, together, stage(1, training_runs.SCRIPT))
    difference = training_runs.largest_difference(one, many)
    _compare(console, one, many, difference)
    loss_plot.draw(one, many, out / "loss.png")
    _draw_plan(console, plan_path, out / "plan.svg")
    console.print(f"wrote {', '.join(str(out / name) for name in FILES if (out / name).exists())}")
    _say_what_next(console, out)
    if not difference <= AGREE:
        raise HpmlError(f"the losses differ by {difference:.1e}, more than {AGREE:.0e}", where=str(out / "loss.png"),
                        next_step="this is a bug: please report it with plan.json")


def _say_what_next(console: Console, out: Path) -> None:
    plan, parameter = out / "plan.json", "blocks.0.up.weight"
    console.print("next steps:")
    for what, command in (("view the plan", f"open {out / 'plan.svg'}"),
                          ("explain a parameter's placement", f"hpml explain {plan} {parameter}"),
                          ("simulate a step", f"hpml simulate {plan} --timeline {out / 'step.png'}"),
                          ("plan your own model", "hpml plan FILE.py:FUNCTION --cluster 1x8:h100-80g")):
        if command.startswith("open") and not (out / "plan.svg").exists():
            continue
        console.print(f"  {what:<36}  {command}", markup=False)


@contextlib.contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[..., Callable[[int, float], None]]]:
    """Yield a function that announces a run and returns its per-step callback: a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
               TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        def stage(ranks: int, script: Path, then: Callable[[int, float], None] = lambda step, loss: None):
            console.print(f"$ hpml run --nproc {ranks} {script}" if ranks > 1 else f"$ python {script}")
            task = bar.add_task(f"{ranks} rank{'s' * (ranks > 1)}", total=steps, loss="compiling")

            def on_step(step: int, loss: float) -> None:
                bar.update(task, completed=step, loss=f"loss {loss:.3f}")
                then(step, loss)

            return on_step

        yield stage


def _show_plan(console: Console, path: Path) -> None:
    from hpml_compiler.plan_api.model_plan import Plan
    from hpml_compiler.visualize.plan_table import renderable

    plan = Plan.load(path)
    if console.is_terminal:
        console.print(renderable(plan))
    else:
        print(plan.table())


def _draw_plan(console: Console, source: Path, target: Path) -> None:
    from hpml_compiler.plan_api.model_plan import Plan

    try:
        Plan.load(source).render(target)
    except MissingDependency as error:  # the other files are written, and the error says how to get the picture
        console.print(str(error), markup=False)


def _compare(console: Console, one: TrainingRun, many: TrainingRun, difference: float) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("step", "loss, 1 rank", f"loss, {many.ranks} ranks", "relative difference"):
        table.add_column(title, justify="right")
    count = len(one.curve)
    for step in sorted({1 + round(k * (count - 1) / (ROWS - 1)) for k in range(ROWS)}):
        a, b = one.curve[step - 1], many.curve[step - 1]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(a):.1e}")
    console.print(table)
    console.print(f"{one.parameters / 1e6:.1f} M parameters, {count} steps: the largest relative difference of a loss is "
                  f"{difference:.1e}")
    for run in (one, many):
        console.print(f"{run.ranks} rank{'s' * (run.ranks > 1)}, {run.threads} thread{'s' * (run.threads > 1)}"
                      f"{' each' * (run.ranks > 1)}: first step after {run.first_step_s:.1f} s, then "
                      f"{run.step_s * 1e3:.0f} ms a step")
    console.print("both runs have the same cores: several ranks on one CPU are a demonstration, not a speedup")
