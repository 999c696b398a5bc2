"""Write reports as TensorBoard scalars."""
from __future__ import annotations

import importlib.util
from typing import Any

from hpml_compiler.monitor.report import Report
from passes.errors import MissingDependency


def check_installed() -> None:
    """Raise MissingDependency if the `tensorboard` package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingDependency(what="TensorBoard scalars need the package tensorboard, which is not installed",
                                where="options['tensorboard']", next_step="pip install tensorboard, or remove the option")


def open_writer(folder: str) -> Any:
    """Open a `SummaryWriter` for a log folder. Raises MissingDependency."""
    check_installed()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def scalars(report: Report) -> dict[str, float]:
    """Scalars of a report by tag: ms, MiB, J and ratios."""
    time, found = report.step_time, {}
    found["hpml/step_time_ms/predicted"], found["hpml/step_time_ms/measured"] = time.predicted / 1e3, time.measured / 1e3
    found["hpml/step_time_ratio"] = time.ratio
    if report.peak_memory is not None:
        memory = report.peak_memory
        found["hpml/peak_memory_MiB/predicted"] = memory.predicted / 2**20
        found["hpml/peak_memory_MiB/measured"] = memory.measured / 2**20
        found["hpml/peak_memory_ratio"] = memory.ratio
    for name, joules in (("predicted", report.energy_j), ("measured", report.measured_energy_j)):
        if joules is not None:
            found[f"hpml/energy_J/{name}"] = joules
    for each in report.classes:
        found[f"hpml/class_ms/{each.name}/predicted"] = each.predicted / 1e3
        found[f"hpml/class_ms/{each.name}/measured"] = each.measured / 1e3
    return found


def write(writer: Any, report: Report) -> None:
    write_scalars(writer, scalars(report), report.step)


def write_scalars(writer: Any, values: dict[str, float], step: int) -> None:
    for tag, value in values.items():
        writer.add_scalar(tag, value, step)
    writer.flush()
