"""`hpml watch FOLDER`: follow a recorded run in a terminal."""
from __future__ import annotations

import math
import sys
import time
from typing import Annotated, Any

import typer

from hpml_compiler.run_records.run_history import read_run
from hpml_compiler.run_records.run_summary import summary_of

BARS = "▁▂▃▄▅▆▇█"
EVENTS = 6


def register(app: typer.Typer) -> None:
    app.command("watch")(watch)


def watch(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of hpml_compiler.Monitor.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once; the default where there is no terminal.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
) -> None:
    """Show step, throughput, memory, values and events of a run, until it ends."""
    from hpml_compiler.visualize.terminal import show

    if once or not sys.stdout.isatty():
        show(_view(read_run(folder)))
        return
    from rich.live import Live

    with Live(_view(read_run(folder)), refresh_per_second=4, screen=False) as live:
        while True:
            time.sleep(interval)
            run = read_run(folder)
            live.update(_view(run))
            if run.state() in ("ended", "stopped", "failed"):
                return


def _view(run: Any) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from hpml_compiler.visualize.terminal import columns

    found = summary_of(run)
    grid = Table.grid(padding=(0, 2))
    for _ in range(4):
        grid.add_column(overflow="fold")
    pairs = list(found.items())
    for left, right in zip(pairs[::2], [*pairs[1::2], ("", "")]):
        grid.add_row(*(Text(each) for each in (*left, *right)))
    lines: list[Any] = [Text(run.folder, style="bold"), grid]
    width = max(min(columns() - 24, 100), 20)
    for name in (*run.value_names()[:4], "step_s", "tokens_per_s" if run.series("tokens_per_s") else "samples_per_s"):
        points = run.series(name)
        if len(points) > 1:
            lines.append(Text(f"{name[:20]:<22}{sparkline([y for _, y in points], width)}"))
    for rank, event in run.events()[-EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        lines.append(Text(f"{at} step {event.get('step', '')} rank {rank} {event['event']}: {event.get('text', '')}",
                          overflow="ellipsis", no_wrap=True))
    return Group(*lines)


def sparkline(figures: list[float], width: int) -> str:
    """Means of `width` stretches as bars between the lowest and the highest; a space where a figure is not finite."""
    size = max(math.ceil(len(figures) / width), 1)
    means = [sum(part) / len(part) for part in (figures[k:k + size] for k in range(0, len(figures), size))]
    known = [each for each in means if math.isfinite(each)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) or 1.0
    return "".join(BARS[min(int((each - low) / step * len(BARS)), len(BARS) - 1)] if math.isfinite(each) else " "
                   for each in means)
