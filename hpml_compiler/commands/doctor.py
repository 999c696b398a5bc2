"""`hpml doctor`: is everything there that hpml needs, and if not, how to get it."""
from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from hpml_compiler.commands._checks import Check, run_checks
from passes.errors import MissingDependency


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the all_reduce over two processes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that everything hpml needs is there; exit code 4 says that something is not."""
    checks = list(run_checks(quick))
    missing = [check for check in checks if check.status == "missing"]
    if as_json:
        print(json.dumps({"ok": not missing, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        _print_table(checks)
    if missing:
        raise MissingDependency(f"hpml cannot work here, for want of: {', '.join(check.name for check in missing)}",
                                where=sys.executable, next_step="; ".join(check.next_step for check in missing))


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "warning": "yellow", "missing": "red"}
    table = Table("check", "", "found", "next step")
    for check in checks:  # as Text, since a remedy such as pulp[highs] is no markup
        table.add_row(check.name, Text(check.status, style=colors[check.status]), Text(check.detail),
                      Text(check.next_step))
    Console().print(table)
