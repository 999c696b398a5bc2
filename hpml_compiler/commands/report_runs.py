"""`hpml report FOLDER...`: one HTML page of recorded runs, which needs neither a server nor a network."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpml_compiler.commands._at_work import at_work
from hpml_compiler.run_records.run_history import read_run
from passes.filesystem.text_files import check_writable


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER...", help="Folders of hpml_compiler.Monitor.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a page of one or several runs: figures, charts, events, plan, and a step as planned and as measured."""
    check_writable(output, "the report")
    from hpml_compiler.pages.run_page import write_run_page

    with at_work() as progress:
        progress("reading")
        runs = [read_run(folder) for folder in dict.fromkeys(folders)]
        progress("drawing")
        write_run_page(runs, output)
    print(output)
