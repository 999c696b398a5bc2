"""`hpml checkpoint list|verify|convert FOLDER`: look at checkpoints of a run, verify them, take the model out."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpml_compiler.commands._at_work import at_work
from hpml_compiler.units import parse_bytes
from passes.errors import BadInput

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of hpml_compiler.Checkpointer, or its URL.")]
Step = Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; by default the newest without damage.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    commands = typer.Typer(help="List, verify and convert the checkpoints of a run.", no_args_is_help=True,
                           rich_markup_mode=None)
    commands.command("list")(list_checkpoints)
    commands.command("verify")(verify)
    commands.command("convert")(convert)
    app.add_typer(commands, name="checkpoint")


def list_checkpoints(folder: Folder, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder: step, size, what wrote them, and files that are missing or of another size."""
    from hpml_compiler.checkpoints.inspection import listed, opened

    _print([each.to_json() for each in listed(opened(folder))], as_json)


def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read and hash every file of every checkpoint. The exit code is 2 if any is damaged."""
    from hpml_compiler.checkpoints.inspection import listed, opened

    found = []
    with at_work() as progress:
        for each in listed(opened(folder), hashed=True):
            progress(f"step {each.step} verified")
            found.append(each.to_json())
    _print(found, as_json)
    damaged = [each for each in found if each["damage"]]
    if damaged:
        first = f"step {damaged[0]['step']}: {damaged[0]['damage']}"
        raise BadInput(f"{len(damaged)} of {len(found)} checkpoints are damaged", first,
                       "resume() passes damaged ones over; remove them, or restore the file from a copy")


def convert(
    folder: Folder,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New folder for the model.")],
    step: Step = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point weights, as to bfloat16.")] = None,
    file_size: Annotated[str, typer.Option(help="Size of a file.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as whole tensors in Hugging Face's layout: model.safetensors, or files with an index."""
    from hpml_compiler.checkpoints.inspection import convert as run
    from hpml_compiler.checkpoints.inspection import dtype_named, opened

    try:
        file_bytes = parse_bytes(file_size)
    except ValueError as error:
        raise BadInput(f"{file_size!r:.40} is not a size: {error}", "--file-size", "write 5GB or 500MiB") from error
    kind = None if dtype is None else dtype_named(dtype)
    with at_work() as progress:
        progress("converting")
        found, count = run(opened(folder), step, target, kind, file_bytes)
    print(f"{target}: the model of step {found}, {count} tensors")


def _print(found: list[dict], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checkpoints": found}, allow_nan=False))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from hpml_compiler.visualize.terminal import show

    table = Table("step", box=box.SIMPLE, pad_edge=False)
    for title in ("MB", "ranks"):
        table.add_column(title, justify="right")
    for title in ("mesh", "torch", "state"):
        table.add_column(title)
    for each in found:
        mesh = " ".join(f"{axis}={size}" for axis, size in each.get("mesh", {}).items())
        table.add_row(str(each["step"]), f"{each['bytes'] / 1e6:.1f}", str(each.get("ranks", "")), Text(mesh),
                      str(each.get("torch", "")), Text(each["damage"] or "whole"))
    show(table)
