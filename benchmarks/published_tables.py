"""Published step times against predictions: calibrate a device on the rows a file fits to, predict the rows it holds out.

    python benchmarks/published_tables.py benchmarks/published/megatron_sc21.json [--rows 1.7B,3.6B,7.5B] [--plans DIR]

Prints one JSON object: the fitted parameters, and per row the measured and predicted time and the relative error.
--rows: only these, by name. --plans: a folder where plans are kept, since planning takes most of the time; the plans in it
are taken as they are, so empty it after a change of the planner.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from hpml_compiler.instruments.calibration.device_calibration import calibrate, plan_row
from hpml_compiler.instruments.calibration.measured_rows import MeasuredRow, read_rows
from hpml_compiler.plan_api.model_plan import Plan


def kept_plan(row: MeasuredRow, folder: Path | None) -> Plan:
    """The plan of a row, read from `folder` or made and kept there."""
    path = folder / f"plan_{row.name}.json" if folder else None
    if path is not None and path.is_file():
        return Plan.load(path)
    plan = plan_row(row)
    if path is not None:
        plan.save(path)
    return plan


def table(path: Path, names: list[str] | None, plans: Path | None, fit: list[str] | None) -> dict:
    """The report on the rows of a file: that of `hpml calibrate`, with the mean errors of rows with and without stages."""
    rows = [row for row in read_rows(path) if not names or row.name in names]
    found = calibrate(rows, [kept_plan(row, plans) for row in rows], names=fit)
    report = found.to_json()
    for key, pipelined in (("mean_held_out_error_one_stage", False), ("mean_held_out_error_pipelines", True)):
        errors = [abs(each["error"]) for row, each in zip(rows, report["rows"])
                  if row.held_out and (row.pipeline is not None) == pipelined]
        report[key] = sum(errors) / len(errors) if errors else None
    return {"benchmark": "published_tables", "file": path.name, **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", default="")
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--fit", action="append")
    args = parser.parse_args()
    if args.plans:
        args.plans.mkdir(parents=True, exist_ok=True)
    print(json.dumps(table(args.file, [n for n in args.rows.split(",") if n] or None, args.plans, args.fit)))


if __name__ == "__main__":
    main()
