"""`hpml doctor`: check hpml's dependencies, and say how to get missing ones."""
from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpml_compiler.commands._checks import Check, run_checks
from hpml_compiler.instruments.discovery.cluster_discovery import Discovery, discover
from hpml_compiler.plans.cache import graph_database, plan_database
from passes.errors import BadInput, MissingDependency
from passes.filesystem.text_files import check_writable, is_device
from passes.json_records import to_json


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the all_reduce over two processes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="Describe this machine's cluster instead; under "
                                          "torchrun with all its nodes.")] = False,
    save: Annotated[Path | None, typer.Option(help="With --cluster: write it to this file (.json), which `hpml plan "
                                              "--cluster` reads.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="With --cluster: measure matrix products and memory, "
                                          "under 10 s.")] = False,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Delete cached plans and graphs instead; measurements of "
                                              "`hpml profile` stay.")] = False,
) -> None:
    """Check that hpml's dependencies are installed; exit code 4 if any is missing."""
    if clear_cache:
        if cluster or save is not None or measure or quick:
            raise BadInput("--clear-cache cannot be combined with other options", "hpml doctor", "give it alone")
        return _clear_cache(as_json)
    if cluster:
        return _describe_cluster(as_json, save, measure)
    if save is not None or measure:
        raise BadInput("--save and --measure need --cluster", "hpml doctor", "add --cluster")
    checks = list(run_checks(quick))
    missing = [check for check in checks if check.status == "missing"]
    if as_json:
        print(json.dumps({"ok": not missing, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        _print_table(checks)
    if missing:
        raise MissingDependency(f"hpml cannot run: {', '.join(check.name for check in missing)} missing",
                                where=sys.executable, next_step="; ".join(check.next_step for check in missing))


def _clear_cache(as_json: bool) -> None:
    cleared = [path for path in (plan_database.clear(), graph_database.clear()) if path is not None]
    if as_json:
        print(json.dumps({"cleared": [*map(str, cleared)]}))
    else:
        print("\n".join(f"emptied {path}" for path in cleared) or "the cache is empty")


def _describe_cluster(as_json: bool, save: Path | None, measure: bool) -> None:
    """Print, and save, the discovered cluster; under torchrun on rank 0 only."""
    if save is not None and save.suffix != ".json" and not is_device(save):
        raise BadInput("a cluster file needs the suffix .json", f"--save {save}", f"write --save {save}.json")
    check_writable(save, "the cluster")
    found = _discovered(measure)
    if os.environ.get("RANK", "0") != "0":
        return
    if save is not None:
        found.cluster.save(save)
    if as_json:
        print(json.dumps({"text": str(found.cluster), "cluster": to_json(found.cluster),
                          "findings": [dataclasses.asdict(each) for each in found.findings]}))
        return
    from rich.table import Table
    from rich.text import Text

    from hpml_compiler.visualize.terminal import show

    table = Table("what", "value", "how", title=str(found.cluster))
    for each in found.findings:
        table.add_row(Text(each.what), Text(each.value), each.how)
    show(table)
    if save is not None:
        print(f"wrote {save}; plan for it with: hpml plan TARGET --cluster {save}")


def _discovered(measure: bool) -> Discovery:
    from hpml_compiler.runtime.process.world_group import process_group

    with process_group():
        return discover(measure)


def _print_table(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from hpml_compiler.visualize.terminal import show

    colors = {"ok": "green", "warning": "yellow", "missing": "red"}
    table = Table("check", "", "found", "next step")
    for check in checks:  # as Text: a remedy such as pulp[highs] is not markup
        table.add_row(check.name, Text(check.status, style=colors[check.status]), Text(check.detail),
                      Text(check.next_step))
    show(table)
