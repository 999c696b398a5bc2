"""Calibrate a device: fit its efficiencies to measured step times, and report the prediction error of each row.

Each row is planned once, with the built-in efficiencies and its pinned mesh; the plan is then simulated for every trial of
the parameters. The fit is `passes.cost_model.measured.parameter_fit`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hpml_compiler.cli_target import load_target
from hpml_compiler.instruments.calibration.measured_rows import MeasuredRow
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.simulate import simulate
from passes.cost_model.measured.parameter_fit import FitParameter, ParameterFit, fit, leave_one_out, relative_error
from passes.errors import BadInput
from passes.hardware.cluster import Cluster, DeviceSheet, NodeGroup

SIGMAS = {
    "matmul_efficiency": 0.15,
    "memory_efficiency": 0.15,
    "attention_efficiency": 0.7,
    "intra_node.efficiency": 0.15,
    "inter_node.efficiency": 0.15,
}
"""Prior standard deviations of the logarithms of the built-in efficiencies. Large matmuls and copies reach about the same
share of the peak in all libraries; attention ranges from a tenth (scores through memory) to three quarters (fused)."""

EFFICIENCIES = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
LINKS = ("intra_node.efficiency", "inter_node.efficiency")

NO_LIMIT_BYTES = 10**14
"""More memory than any device has. It is a limit, other than that of plans which leave saved activations to the partitioner:
rows may say what is recomputed."""

StepTime = Callable[[Plan, Cluster, MeasuredRow], float]
"""(plan of a row, its cluster with trial parameters, the row) -> seconds per step."""

@dataclass(frozen=True)
class RowReport:
    """Seconds per step of one row: measured, predicted with the built-in efficiencies (`before_s`), with the fitted ones, and
    with a fit to all other rows (`left_out_s`; None for a held-out row, which is in no fit, and for a single row)."""

    row: MeasuredRow
    measured_s: float
    before_s: float
    predicted_s: float
    left_out_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; errors are (predicted - measured) / measured."""
        report = {
            "name": self.row.name, "target": self.row.target, "cluster": self.row.cluster, "mesh": dict(self.row.mesh),
            "held_out": self.row.held_out, "measured_s": self.measured_s, "before_s": self.before_s,
            "predicted_s": self.predicted_s, "error": relative_error(self.predicted_s, self.measured_s),
            "leave_one_out_s": self.left_out_s,
            "leave_one_out_error": None if self.left_out_s is None else relative_error(self.left_out_s, self.measured_s),
        }
        if self.row.tflops_per_device is not None:
            report["measured_tflops_per_device"] = self.row.tflops_per_device
            report["predicted_tflops_per_device"] = self.row.tflops(self.predicted_s)
        return report


@dataclass(frozen=True)
class Calibration:
    """The calibrated device file, the parameters before and after, and a report on each row."""

    sheet: DeviceSheet
    parameters: tuple[FitParameter, ...]
    fit: ParameterFit
    rows: tuple[RowReport, ...]

    def to_json(self) -> dict[str, Any]:
        """The output of `hpml calibrate --json`; means are of absolute relative errors, None without rows."""
        rows = [report.to_json() for report in self.rows]
        return {
            "device": self.sheet.device.name,
            "parameters": {
                p.name: {"built_in": p.start, "fitted": self.fit.values[p.name], "informed": self.fit.informed[p.name]}
                for p in self.parameters
            },
            "rows": rows,
            "mean_error": _mean([r["error"] for r in rows if not r["held_out"]]),
            "mean_leave_one_out_error": _mean([r["leave_one_out_error"] for r in rows]),
            "mean_held_out_error": _mean([r["error"] for r in rows if r["held_out"]]),
        }


def calibrate(
    rows: Sequence[MeasuredRow], plans: Sequence[Plan], device: DeviceSheet | None = None, names: Sequence[str] | None = None,
    step_time: StepTime | None = None,
) -> Calibration:
    """Fit the parameters `names` of `device` (default: the device of the first row's cluster) to `rows` with `plans`.

    The default names are the three efficiencies of the device, and those of its links if there are more than five rows.
    Raises BadInput for rows of other devices, unknown names and rows that leave nothing to fit.
    """
    step_time = step_time or simulated
    clusters = [Cluster.parse(row.cluster) for row in rows]
    sheet = device or _sheet(clusters[0].group)
    for row, cluster in zip(rows, clusters):
        if cluster.group.device.name != sheet.device.name:
            raise BadInput(f"the row is of the device {cluster.group.device.name}, not {sheet.device.name}", row.name,
                           "calibrate each device on rows of its own, or name it with --device")
    fitted = [number for number, row in enumerate(rows) if not row.held_out]
    parameters = _parameters(sheet, names, len(fitted))
    measured = [row.measured_s for row in rows]
    memo: dict[tuple, float] = {}

    def predict(number: int, values: Mapping[str, float]) -> float:
        key = (number, *sorted(values.items()))
        if key not in memo:
            memo[key] = step_time(plans[number], with_parameters(clusters[number], values), rows[number])
        return memo[key]

    found = fit(predict, measured, parameters, fitted)
    others = leave_one_out(lambda i, values: predict(fitted[i], values), [measured[i] for i in fitted], parameters)
    left_out = dict(zip(fitted, others))
    start = {p.name: p.start for p in parameters}
    reports = tuple(
        RowReport(row, measured[i], predict(i, start), predict(i, found.values), left_out.get(i))
        for i, row in enumerate(rows)
    )
    return Calibration(_calibrated(sheet, found, [rows[i] for i in fitted]), parameters, found, reports)


def plan_row(row: MeasuredRow) -> Plan:
    """Plan a row's target on its cluster and pinned mesh, with its pipeline stages and microbatches.

    Memory is not limited: the measured run did fit, possibly with recomputation that is not in the plan.

    Raises BadInput with the row's name.
    """
    from hpml_compiler import api

    model, batch = load_target(row.target)
    if row.outputs == "loss":
        from hpml_compiler.instruments.calibration.loss_only_model import LossOnly

        model = LossOnly(model)
    try:
        cluster = Cluster.parse(row.cluster)
        limited = "memory_budget" in row.options
        plan = api.plan(model, batch, cluster=cluster if limited else _without_limit(cluster), **row.planned)
    except BadInput as error:
        raise BadInput(error.what, f"{row.name}: {error.where}", error.next_step) from error
    if not isinstance(plan, Plan):
        raise BadInput("the cluster has groups of different devices", row.name, "calibrate each device on rows of its own")
    return plan


def _without_limit(cluster: Cluster) -> Cluster:
    """The cluster with devices of practically unlimited memory."""
    return replace(cluster, groups=tuple(
        replace(group, device=replace(group.device, memory_bytes=NO_LIMIT_BYTES)) for group in cluster.groups))


def simulated(plan: Plan, cluster: Cluster, row: MeasuredRow) -> float:
    """`StepTime` of the simulator."""
    microbatches = row.microbatches if row.pipeline is None else 1  # with a pipeline they are in the plan
    return simulate(plan, cluster, recompute=row.recompute, microbatches=microbatches).step_us * 1e-6


def with_parameters(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """The cluster with these efficiencies of its devices and links."""
    return replace(cluster, groups=tuple(_changed(group, values) for group in cluster.groups))


def _changed(record: Any, values: Mapping[str, float]) -> Any:
    """Replace efficiencies in a group of nodes or a device file; both have a device and links with the same field names."""
    own = {name: value for name, value in values.items() if "." not in name}
    links = {name.partition(".")[0]: value for name, value in values.items() if "." in name}
    return replace(record, device=replace(record.device, **own),
                   **{name: replace(getattr(record, name), efficiency=value) for name, value in links.items()})


def _sheet(group: NodeGroup) -> DeviceSheet:
    return DeviceSheet(**{f.name: getattr(group, f.name) for f in fields(DeviceSheet) if hasattr(group, f.name)})


def _parameters(sheet: DeviceSheet, names: Sequence[str] | None, rows: int) -> tuple[FitParameter, ...]:
    if names is None:
        names = EFFICIENCIES if rows <= len(EFFICIENCIES + LINKS) else EFFICIENCIES + LINKS
    if unknown := [name for name in names if name not in SIGMAS]:
        raise BadInput(f"{unknown[0]!r} is no parameter that can be fitted", "calibration", f"choose from {', '.join(SIGMAS)}")

    def start(name: str) -> float:
        record, dot, field = name.partition(".")
        return getattr(getattr(sheet, record), field) if dot else getattr(sheet.device, name)

    return tuple(FitParameter(name, start(name), SIGMAS[name]) for name in dict.fromkeys(names))


def _calibrated(sheet: DeviceSheet, found: ParameterFit, rows: Sequence[MeasuredRow]) -> DeviceSheet:
    said = ", ".join(f"{name} {value:.3f}" for name, value in found.values.items())
    source = f"{sheet.device.source}; calibrated on {', '.join(row.name for row in rows)}: {said}"
    changed = _changed(sheet, found.values)
    return replace(changed, device=replace(changed.device, source=source))


def _mean(errors: Sequence[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return sum(known) / len(known) if known else None
