"""Figures of a run that its plans and their comparisons with measurements give: MFU, prediction, communication, bubble."""
from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpml_compiler.monitor.profiled_step import KernelTimes
from hpml_compiler.monitor.report import Report
from hpml_compiler.monitor.stage_monitor import StagesReport
from hpml_compiler.options import Options
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from passes.errors import HpmlError

log = logging.getLogger("hpml")


class PlanFigures:
    """options: of the latest graph. dtype: in which its training computes."""

    def __init__(self, folder: Path, note: Callable[[str, str], None]) -> None:
        self.folder, self.note = folder, note
        self.options = Options.parse(None)
        self.dtype = "float32"
        self._peaks: dict[str, float] = {}
        self._budget: int | None = None
        self._reported: tuple[Report | None, StagesReport | None] = None, None
        self._saved = 0
        self._drawn: KernelTimes | None = None

    @property
    def device_type(self) -> str:
        return device_type()

    @contextlib.contextmanager
    def new_graphs(self) -> Iterator[list[GraphPlan]]:
        """Collect the plans of the graphs that are compiled inside."""
        before, found = len(session.current().graphs), []
        yield found
        found += session.current().graphs[before:]

    def figures(self, flops: float, seconds: float) -> dict[str, Any]:
        """Figures of a record: `mfu`, `budget` in bytes, and of the latest comparison `predicted_s`, `communication` and
        `bubble` as shares of the step."""
        found: dict[str, Any] = {}
        if flops and (peak := self._peak()):
            found["mfu"] = flops / seconds / peak
        if self._budget:
            found["budget"] = self._budget
        report, stages = self._latest()
        if report is not None:
            found["predicted_s"] = report.step_time.predicted / 1e6
            sent = next((each.measured for each in report.classes if each.name == "collective"), None)
            if sent is not None and report.step_time.measured:
                found["communication"] = min(sent / report.step_time.measured, 1.0)
        if stages is not None:
            found["bubble"] = stages.bubble.measured
            found.setdefault("predicted_s", stages.loop.predicted / 1e6)
        return found

    def report(self, write: Callable[[Mapping[str, Any]], None]) -> bool:
        """Write new comparisons of measured and predicted figures, and the plan. Returns True if there were any."""
        latest = self._latest()
        if latest == (None, None) or all(a is b for a, b in zip(latest, self._reported)):
            return False
        report, stages = latest
        if report is not None and report is not self._reported[0]:
            write({"kind": "comparison", "time": time.time(), **_json(report)})
            self._timeline(write)
        if stages is not None and stages is not self._reported[1]:
            write({"kind": "stages", "time": time.time(), **_json(stages)})
        self._reported = latest
        if not session.current().unplanned:  # one that is made on demand takes seconds: the end of the run makes it
            self.save()
        return True

    def _timeline(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        """Write the profiled step, once."""
        monitor = session.current().monitor
        result = None if monitor is None else monitor.profiling.result
        if result is not None and result is not self._drawn:
            write({"kind": "timeline", "time": time.time(), "events": [asdict(each) for each in result.timeline]})
            self._drawn = result

    def save(self) -> None:
        """Save the plan beside the records, if there is one, on rank 0."""
        made = session.current()
        count = len(made.graphs) + len(made.unplanned)
        if this_rank() or not count or count == self._saved:
            return
        try:
            session.last_plan().save(self.folder / "plan.json")
            self._saved = len(session.current().graphs)
        except HpmlError as error:
            log.warning("the plan of the run is not saved: %s", error)

    def _latest(self) -> tuple[Report | None, StagesReport | None]:
        made = session.current()
        return (None if made.monitor is None else made.monitor.report), made.stages_report

    def _peak(self) -> float:
        """FLOP/s of one device; 0.0 if it is not known."""
        if self.dtype not in self._peaks:
            try:
                device = local_cluster(self.options, world_size()).device
                self._peaks[self.dtype] = device.peak(self.dtype)
                on_device = device_type() == "cuda"
                self._budget = self.options.budget_bytes(device.memory_bytes) or (device.memory_bytes if on_device else None)
            except (HpmlError, AttributeError) as error:  # devices of several kinds have no one peak
                log.debug("the peak rate of the devices is unknown: %s", error)
                self._peaks[self.dtype] = 0.0
        return self._peaks[self.dtype]


def _json(record: Report | StagesReport) -> dict[str, Any]:
    return asdict(record)
