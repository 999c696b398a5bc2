"""Published step times against predictions: calibrate a device on the rows a file fits to, predict the rows it holds out.

    python benchmarks/published_tables.py benchmarks/published/megatron_sc21.json [--rows 1.7B,3.6B] [--plans DIR] [--unpinned]

Prints one JSON object: the fitted parameters, and per row the measured and predicted time and the relative error.
--rows: only these, by name. --plans: a folder where plans are kept, since planning takes most of the time; the plans in it
are taken as they are, so empty it after a change of the planner. --unpinned: plan the model of each row once more, with nothing
pinned, within the memory of its devices and with the fitted efficiencies. `gained` is the part of the row's predicted step that
this plan saves.
"""
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpml_compiler import api
from hpml_compiler.cli_target import load_target
from hpml_compiler.instruments.calibration.device_calibration import calibrate, plan_row, with_parameters
from hpml_compiler.instruments.calibration.loss_only_model import LossOnly
from hpml_compiler.instruments.calibration.measured_rows import MeasuredRow, read_rows
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.simulate.simulator import simulate
from passes.hardware.cluster import Cluster


def kept_plan(row: MeasuredRow, folder: Path | None) -> Plan:
    """The plan of a row, read from `folder` or made and kept there."""
    path = folder / f"plan_{row.name}.json" if folder else None
    if path is not None and path.is_file():
        return Plan.load(path)
    plan = plan_row(row)
    if path is not None:
        plan.save(path)
    return plan


def unpinned(row: MeasuredRow, fitted: Mapping[str, float], pinned_s: float) -> dict[str, Any]:
    """The plan with nothing pinned, on the row's cluster. pinned_s: the row's step, predicted with the same efficiencies."""
    model, batch = load_target(row.target)
    cluster = with_parameters(Cluster.parse(row.cluster), fitted)
    start = time.process_time()
    plan = api.plan(LossOnly(model), batch, cluster=cluster)
    assert isinstance(plan, Plan), "the cluster has equal devices"
    graph, seconds = plan.graphs[0], 1e-6 * simulate(plan).step_us
    return {"mesh": dict(plan.mesh), "microbatches": graph.microbatches.count if graph.microbatches else 1,
            "schedule": graph.pipeline and graph.pipeline.schedule, "simulated_s": seconds,
            "again_s": 1e-6 * graph.predicted.again_us, "peak_bytes": plan.memory.peak, "gained": 1.0 - seconds / pinned_s,
            "cpu_s": time.process_time() - start}


def table(path: Path, names: list[str] | None, plans: Path | None, fit: list[str] | None, opens: bool) -> dict[str, Any]:
    """The report on the rows of a file: that of `hpml calibrate`, with the mean errors of rows with and without stages. opens:
    with plans that pin nothing."""
    rows = [row for row in read_rows(path) if not names or row.name in names]
    found = calibrate(rows, [kept_plan(row, plans) for row in rows], names=fit)
    report = found.to_json()
    if opens:
        targets = dict[tuple[str, str], dict[str, Any]]()  # rows of one model on one cluster have one such plan
        for row, each in zip(rows, report["rows"]):
            known = targets.get((row.target, row.cluster))
            each["unpinned"] = targets[row.target, row.cluster] = unpinned(
                row, found.fit.values, each["predicted_s"]) if known is None else {
                    **known, "gained": 1.0 - known["simulated_s"] / each["predicted_s"]}
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
    parser.add_argument("--unpinned", action="store_true")
    args = parser.parse_args()
    if args.plans:
        args.plans.mkdir(parents=True, exist_ok=True)
    print(json.dumps(table(args.file, [n for n in args.rows.split(",") if n] or None, args.plans, args.fit, args.unpinned)))


if __name__ == "__main__":
    main()
