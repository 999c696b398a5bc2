"""Runs as one HTML page: figures side by side, charts by step, events, and the plan with its step as planned and measured."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpml_compiler.pages.line_chart import line_chart
from hpml_compiler.pages.page_parts import Cell, page, picture, section, table, text
from hpml_compiler.pages.plan_page import drawn, head
from hpml_compiler.pages.timeline_svg import memory_svg, timeline_svg
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.run_records.run_history import RunHistory
from hpml_compiler.run_records.run_summary import MEMORY, TEXTS, bytes_text, summary_of
from hpml_compiler.simulate.simulation import Simulation
from hpml_compiler.simulate.simulator import simulate
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.errors import HpmlError
from passes.filesystem.text_files import write_file
from passes.simulation.step_timeline import TimelineEvent

MOST_EVENTS = 300


def write_run_page(runs: Sequence[RunHistory], path: str | os.PathLike[str]) -> Path:
    """Write the page of one or several runs. Raises BadInput."""
    write_file(path, run_page(runs), "the report")
    return Path(path)


def run_page(runs: Sequence[RunHistory]) -> str:
    named = _named(runs)
    title = "Run " + ", ".join(named) if len(named) == 1 else "Runs " + ", ".join(named)
    parts = [f"<h1>{text(title)}</h1>", _side_by_side(named), *_charts(named)]
    for name, run in named.items():
        parts.append(section(f"Events of {name}", _events(run)))
        parts += _planned(name, run)
    return page(title, [part for part in parts if part])


def _named(runs: Sequence[RunHistory]) -> dict[str, RunHistory]:
    """Runs by the shortest names that tell them apart."""
    names = [run.name for run in runs]
    alike = len(set(names)) < len(names)
    return {(run.folder if alike else run.name): run for run in runs}


def _side_by_side(runs: Mapping[str, RunHistory]) -> str:
    found = {name: summary_of(run) for name, run in runs.items()}
    titles = list(dict.fromkeys(title for each in found.values() for title in each))
    return table(("", *found), [(title, *(each.get(title, "") for each in found.values())) for title in titles])


def _charts(runs: Mapping[str, RunHistory]) -> Iterator[str]:
    values = list(dict.fromkeys(name for run in runs.values() for name in run.value_names()))
    for name in values:
        yield _chart(name, runs, name, lambda figure: f"{figure:.4g}")
    for name in ("samples_per_s", "tokens_per_s", "step_s", "mfu"):
        yield _chart({"samples_per_s": "Samples per second", "tokens_per_s": "Tokens per second", "step_s": "Step time",
                      "mfu": "MFU"}[name], runs, name, TEXTS[name][1])
    for name in MEMORY:
        yield _chart(f"Memory over the run: {name}", runs, name, bytes_text, {
            f"budget of {label}" if len(runs) > 1 else "budget": run.series("budget")[-1][1]
            for label, run in runs.items() if name != "resident" and run.series("budget")})


def _chart(title: str, runs: Mapping[str, RunHistory], figure: str, format_: Callable[[float], str],
           limits: Mapping[str, float] | None = None) -> str:
    series = {name: points for name, run in runs.items() if (points := run.series(figure))}
    svg = line_chart(series, format_, limits)
    return section(title, picture(svg)) if svg else ""


def _events(run: RunHistory) -> str:
    found = run.events()
    rows: list[Sequence[Cell]] = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"])), str(event.get("step", "")), str(rank),
         event["event"], event.get("text", "")) for rank, event in found[-MOST_EVENTS:]]
    more = f"<p>{len(found) - MOST_EVENTS} earlier events are left out</p>" if len(found) > MOST_EVENTS else ""
    torn = f"<p>{run.torn} torn lines in its files</p>" if run.torn else ""
    return (table(("time", "step", "rank", "event", ""), rows) or "<p>none</p>") + more + torn


def _planned(name: str, run: RunHistory) -> Iterator[str]:
    plan, played = None, None
    if run.plan_path is not None:
        try:
            plan = Plan.load(run.plan_path)
            played = simulate(plan)
        except HpmlError as error:
            yield section(f"Plan of {name}", f"<p>{text(error)}</p>")
    if plan is not None:
        found = plan.describe()
        yield section(f"Plan of {name}", *head(found), drawn(plan, view="overview", identifier="overview"))
    yield from _timelines(name, run, played)
    if played is not None and plan is not None:
        yield section(f"Memory of a step of {name}, as planned, by category", picture(memory_svg(
            played, plan.describe().limit_bytes)))
    yield from _compared(name, run)


def _timelines(name: str, run: RunHistory, played: Simulation | None) -> Iterator[str]:
    """The step as planned and as measured, one above the other, on one scale."""
    measured = _measured(run)
    if measured is None and played is None:
        return
    until = max(each.step_us for each in (measured, played) if each is not None)
    parts = []
    if played is not None:
        parts += [f"<p>planned, {format_us(played.step_us)}</p>", picture(timeline_svg(played, until))]
    if measured is not None:
        parts += [f"<p>measured, {format_us(measured.step_us)}</p>", picture(timeline_svg(measured, until))]
    else:
        parts.append("<p>no step was profiled yet</p>")
    yield section(f"A step of {name}, as planned and as measured", *parts)


def _measured(run: RunHistory) -> Simulation | None:
    """The measured step, of rank 0, or of all ranks of a pipeline."""
    stages, profiled = run.report("stages"), run.report("timeline")
    rows = (stages or {}).get("timeline") or (profiled or {}).get("events")
    if not rows:
        return None
    events = tuple(TimelineEvent(int(each["lane"]), each["stream"], each["name"], each["kind"], each["start_us"],
                                 each["stop_us"]) for each in rows)
    end = max(event.stop_us for event in events)
    lanes = max(event.lane for event in events) + 1
    return Simulation(end, 0.0, 0.0, 0.0, 0.0, 0.0, 0, None, "measured", events, (), tuple((lane,) for lane in range(lanes)))


def _compared(name: str, run: RunHistory) -> Iterator[str]:
    found, stages = run.report("comparison"), run.report("stages")
    rows: list[Sequence[Cell]] = []

    def add(what: str, figure: Mapping[str, Any], format_: Callable[[float], str]) -> None:
        if figure["predicted"] or figure["measured"]:
            rows.append((what, (format_(figure["predicted"]), figure["predicted"]),
                         (format_(figure["measured"]), figure["measured"])))

    if found is not None:
        add("step time", found["step_time"], format_us)
        for each in found["classes"]:
            add(f"time of {each['name']}", each, format_us)
        if found["peak_memory"] is not None:
            add("peak memory", found["peak_memory"], format_bytes)
        for each in found["memory_parts"]:
            add(f"memory of {each['name']}", each, format_bytes)
    if stages is not None:
        add("pipeline loop", stages["loop"], format_us)
        add("bubble", stages["bubble"], lambda share: f"{share:.1%}")
        for each in stages["stages"]:
            for half in ("forward", "backward"):
                add(f"{half} of a microbatch in stage {each['stage']}", each[half], format_us)
    if rows:
        yield section(f"Predicted and measured figures of {name}", table(("", "predicted", "measured"), rows))
