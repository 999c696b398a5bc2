"""History of a run, read from the records of its ranks: attempts, windows of steps, events, and the state it is in."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpml_compiler.run_records.record_file import PREFIX, SUFFIX, file_of_rank, number_of, read_records
from passes.errors import BadInput

SILENT_S = 60.0
"""A run that has written nothing for this long, and for ten windows, has no known state."""
Point = tuple[float, float]


@dataclass
class RunAttempt:
    """Records of one rank from a start on. start: facts about the process. windows: of steps. events: with their `event`.
    reports: comparisons with the prediction, profiled steps and stages, by their `kind`. end: None if none was written."""

    start: dict[str, Any]
    windows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] | None = None


@dataclass
class RunHistory:
    """History of a run in `folder`. ranks: attempts of each rank; those of rank 0 have everything. torn: lines that could not
    be read."""

    folder: str
    ranks: dict[int, list[RunAttempt]]
    torn: int = 0

    @property
    def name(self) -> str:
        return Path(self.folder).name or self.folder

    @property
    def attempts(self) -> list[RunAttempt]:
        return self.ranks[0]

    @property
    def windows(self) -> list[dict[str, Any]]:
        """Windows of steps that count: those that a later attempt repeated, from an earlier step on, do not."""
        found: list[dict[str, Any]] = []
        for attempt in self.attempts:
            if attempt.windows:
                first = attempt.windows[0]["step"] - attempt.windows[0]["steps"]
                found = [each for each in found if each["step"] <= first]
            found += attempt.windows
        return found

    @property
    def plan_path(self) -> Path | None:
        path = Path(self.folder) / "plan.json"
        return path if path.is_file() else None

    def report(self, kind: str) -> dict[str, Any] | None:
        """The latest report of a kind."""
        return next((each.reports[kind] for each in reversed(self.attempts) if kind in each.reports), None)

    def value_names(self) -> list[str]:
        """Names of the script's own values."""
        return list(dict.fromkeys(name for each in self.windows for name in each.get("values", ())))

    def series(self, name: str) -> list[Point]:
        """(step, figure) of the windows that have it: a figure of the record, or a value of the script."""
        def figure(window: dict[str, Any]) -> Any:
            return window.get("values", {}).get(name, window.get("memory", {}).get(name, window.get(name)))

        return [(float(each["step"]), number_of(found)) for each in self.windows if (found := figure(each)) is not None]

    def events(self) -> list[tuple[int, dict[str, Any]]]:
        """(rank, event) of all ranks in order of time, with each start after the first and what was not ended."""
        found = [(rank, event) for rank, attempts in self.ranks.items() for event in _events_of(attempts)]
        alike = {(event["event"], event.get("step"), event.get("text")): (rank, event)
                 for rank, event in reversed(found) if event["event"] != "failed"}
        own = [each for each in found if each[1]["event"] == "failed"]
        return sorted([*alike.values(), *own], key=lambda pair: pair[1]["time"])

    def state(self, now: Callable[[], float] = time.time) -> str:
        """"running", "ended", "stopped", "failed", or "silent": killed, or in a very long step."""
        last = self.attempts[-1]
        if any(event["event"] == "failed" for each in self.ranks.values() for event in each[-1].events):
            return "failed"
        if last.end is not None:
            return str(last.end.get("how", "ended"))
        times = [each["time"] for each in (last.start, *last.windows, *last.events)]
        longest = max((each["step_s"] * each["steps"] for each in last.windows[-10:]), default=60.0)
        return "running" if now() - max(times) < max(SILENT_S, 10 * longest) else "silent"


def _events_of(attempts: list[RunAttempt]) -> Iterator[dict[str, Any]]:
    for number, attempt in enumerate(attempts):
        if number:
            before = attempts[number - 1]
            how = "" if before.end is not None or any(e["event"] == "failed" for e in before.events) else \
                "the attempt before was killed: "
            yield {"event": "restart", "time": attempt.start["time"], "step": attempt.start.get("step", 0),
                   "text": f"{how}attempt {number + 1} starts on {attempt.start.get('ranks', 1)} ranks"}
        yield from attempt.events


def read_run(folder: str | os.PathLike[str]) -> RunHistory:
    """Read a run's folder. Raises BadInput if nothing was recorded there."""
    own = file_of_rank(folder, 0)
    if not own.is_file():
        raise BadInput("no run was recorded here", str(folder),
                       'write hpml_compiler.Monitor("FOLDER") in the script, and name that folder')
    ranks, torn = {}, 0
    for path in sorted(Path(folder).glob(f"{PREFIX}*{SUFFIX}")):
        number = path.name[len(PREFIX):-len(SUFFIX)]
        if not number.isdecimal():
            continue
        records, lost = read_records(path)
        attempts = _attempts(records)
        torn += lost
        if attempts:
            ranks[int(number)] = attempts
    if 0 not in ranks:
        raise BadInput("the records of the run have no start", str(own), "name a folder that hpml_compiler.Monitor wrote")
    return RunHistory(os.fspath(folder), ranks, torn)


def _attempts(records: list[dict[str, Any]]) -> list[RunAttempt]:
    found: list[RunAttempt] = []
    for record in records:
        kind = record.get("kind")
        if kind == "start" and "time" in record:
            found.append(RunAttempt(record))
        elif not found or kind is None:
            continue
        elif kind == "steps":
            found[-1].windows.append(record)
        elif kind == "event":
            found[-1].events.append(record)
        elif kind == "end":
            found[-1].end = record
        else:
            found[-1].reports[kind] = record
    return found
