"""`hpml calibrate ROWS.json`: fit a device's efficiencies to measured steps and store a device file."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hpml_compiler.commands._at_work import at_work
from passes.filesystem.text_files import check_writable
from passes.hardware.cluster import DeviceSheet, builtin_sheet


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    rows: Annotated[Path, typer.Argument(metavar="ROWS.json", help="Measured steps: target, cluster, mesh, seconds.")],
    device: Annotated[str | None, typer.Option(help="Device to fit, built in or a device file; by default that of "
                                               "the rows' clusters.")] = None,
    fit: Annotated[list[str] | None, typer.Option(metavar="PARAMETER", help="Fit only this parameter, as matmul_efficiency; "
                                                  "repeatable.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the calibrated device to this JSON file, for --cluster "
                                              "4x8:FILE.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit the efficiencies of a device to measured steps; report the error on each row, and leave-one-out."""
    from hpml_compiler.instruments.calibration.device_calibration import calibrate as run
    from hpml_compiler.instruments.calibration.device_calibration import plan_row
    from hpml_compiler.instruments.calibration.measured_rows import read_rows

    check_writable(save, "the device file")
    listed = read_rows(rows)
    sheet = _sheet(device)
    with at_work() as progress:
        plans = []
        for row in listed:
            progress(f"planning {row.name}")
            plans.append(plan_row(row))
        progress("fitting")
        found = run(listed, plans, sheet, fit or None)
    if save is not None:
        found.sheet.save(save)
    report = found.to_json()
    if as_json:
        print(json.dumps(report, allow_nan=False))
    else:
        _print(report)


def _sheet(device: str | None) -> Any:
    if device is None:
        return None
    return DeviceSheet.load(device) if device.endswith(".json") else builtin_sheet(device)


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from hpml_compiler.visualize.terminal import show

    parameters = Table("parameter", box=box.SIMPLE, pad_edge=False)
    for title in ("built in", "fitted", "informed by the rows"):
        parameters.add_column(title, justify="right")
    for name, each in report["parameters"].items():
        parameters.add_row(name, f"{each['built_in']:.3f}", f"{each['fitted']:.3f}", f"{each['informed']:.0%}")
    rows = Table("row", box=box.SIMPLE, pad_edge=False)
    for title in ("measured", "predicted", "error", "left out"):
        rows.add_column(title, justify="right")
    for row in report["rows"]:
        left_out = row["leave_one_out_error"]
        last = "held out" if row["held_out"] else "" if left_out is None else f"{left_out:+.1%}"
        rows.add_row(Text(row["name"]), f"{row['measured_s']:.4g} s", f"{row['predicted_s']:.4g} s", f"{row['error']:+.1%}",
                     last)
    means = [f"mean absolute error, {what}: {report[key]:.1%}" for key, what in (
        ("mean_error", "rows fitted to"), ("mean_leave_one_out_error", "each row predicted from the others"),
        ("mean_held_out_error", "rows held out")) if report[key] is not None]
    show(Group(Text(f"device {report['device']}"), parameters, rows, *map(Text, means)))
