"""Summary of a run: one figure of each kind, as text, for tables of the terminal and of pages."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hpml_compiler.run_records.record_file import number_of
from hpml_compiler.run_records.run_history import RunHistory

RECENT = 20
"""Windows that "now" covers."""


def seconds_text(seconds: float) -> str:
    """A duration as text: 12.3 ms, 4.56 s, 2 h 05 min."""
    if seconds < 1.0:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60.0)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def rate_text(rate: float) -> str:
    return f"{rate:,.0f} / s" if rate >= 100 else f"{rate:.3g} / s"


def bytes_text(size: float) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.3g} {unit}"
    return f"{size / 1024:.3g} KiB"


def share_text(share: float) -> str:
    return f"{share:.1%}"


TEXTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step time", seconds_text), "longest_s": ("longest step", seconds_text),
    "predicted_s": ("predicted", seconds_text),
    "samples_per_s": ("samples", rate_text), "tokens_per_s": ("tokens", rate_text), "mfu": ("MFU", share_text),
    "communication": ("communication", share_text), "bubble": ("bubble", share_text)}
MEMORY = ("allocated", "reserved", "peak", "resident")


def summary_of(run: RunHistory, now: Callable[[], float] = time.time) -> dict[str, str]:
    """Figures by their names, over the latest windows; those that were not measured are left out."""
    windows, start = run.windows[-RECENT:], run.attempts[-1].start
    last = windows[-1] if windows else None
    until = now() if run.state(now) == "running" else _last_time(run)
    found = {"state": run.state(now), "step": str(last["step"] if last else start.get("step", 0)),
             "time": seconds_text(max(until - run.attempts[0].start["time"], 0.0)), "ranks": str(start.get("ranks", 1))}
    for name, (title, text) in TEXTS.items():
        figures = [number_of(each[name]) for each in windows if name in each]
        if figures:
            found[title] = text(max(figures) if name == "longest_s" else statistics.median(figures))
    if last is not None:
        found |= {name: bytes_text(last["memory"][name]) for name in MEMORY if name in last.get("memory", {})}
        if "budget" in last:
            found["budget"] = bytes_text(last["budget"])
        found |= {name: f"{number_of(value):.5g}" for name, value in last.get("values", {}).items()}
    events = [each["event"] for _, each in run.events()]
    found |= {title: str(events.count(event)) for title, event in (
        ("stalls", "stall"), ("failures", "failed"), ("restarts", "restart")) if events.count(event)}
    return found


def _last_time(run: RunHistory) -> float:
    last = run.attempts[-1]
    records: list[dict[str, Any]] = [last.start, *last.windows, *last.events, *([last.end] if last.end else [])]
    return max(each["time"] for each in records)
