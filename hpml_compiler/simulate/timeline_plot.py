"""Plot the timeline of a simulated step: two rows per lane of ranks (compute, communication), with memory below."""
from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpml_compiler.simulate.simulation import Simulation, format_ranks
from hpml_compiler.visualize.formatting import format_bytes, format_us
from hpml_compiler.visualize.picture_files import save_figure
from passes.simulation.step_timeline import TimelineEvent

COLORS = {
    "forward": "#4c78a8", "recompute": "#9ecae9", "offload": "#c7a76c", "backward": "#f58518", "optimizer": "#b279a2",
    "all_gather": "#54a24b", "reduce_scatter": "#88d27a", "all_reduce": "#e45756", "all_to_all": "#ff9da6",
    "send_recv": "#9d755d", "broadcast": "#eeca3b",
}
MEMORY_COLORS = {"parameters": "#d8dcd6", "optimizer": "#bab0ac", "gradients": "#f58518", "saved": "#4c78a8",
                 "recomputed": "#9ecae9", "gathered": "#54a24b", "transient": "#eeca3b", "held": "#d8dcd6"}
OTHER = "#bab0ac"
MOST_LANES = 16
CHARACTER = 0.0085
"""Width of a label's character, as a share of the picture's width."""


def draw(simulation: Simulation, path: str | os.PathLike[str], title: str = "", measured: Sequence[TimelineEvent] = ()) -> Path:
    """Draw into `path` (.png, .svg, .pdf). With more than MOST_LANES lanes, evenly spaced ones are drawn. measured: measured
    compute events of the ranks (`hpml_compiler.monitor.stage_events`), drawn below the simulated ones on the same time axis.
    Raises BadInput if the file cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    path = Path(path)
    end_us = max((event.stop_us for event in measured), default=0.0)
    end_us = max(end_us, simulation.step_us)
    scale, unit = _unit(end_us)
    lanes = _shown(len(simulation.ranks_of_lane))
    rows = ((0.0, 0.33, "compute"), (0.35, 0.2, "communication"), (0.57, 0.33, "measured")) if measured else (
        (0.0, 0.5, "compute"), (0.53, 0.34, "communication"))
    shown = [*simulation.events, *(replace(event, stream="measured") for event in measured)]
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(12, 2.6 + 0.62 * len(lanes) + 0.8), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(0.9 * len(lanes) + 0.6, 1.1))
        for row, lane in enumerate(lanes):
            _lane(upper, [e for e in shown if e.lane == lane], row, rows, scale, end_us)
        upper.set_ylim(len(lanes) - 0.05, -0.05)
        upper.set_yticks([row + top + height / 2 for row in range(len(lanes)) for top, height, _ in rows])
        upper.set_yticklabels([f"{format_ranks(simulation.ranks_of_lane[lane])}  {stream}" if stream == "compute" else stream
                               for lane in lanes for _, _, stream in rows])
        upper.tick_params(axis="y", length=0)
        upper.tick_params(axis="x", labelbottom=False)
        upper.set_xlim(0, end_us / scale or 1)
        _legend(upper, simulation.events)
        _memory(lower, simulation, scale)
        lower.set_xlabel(f"time ({unit})")
        figure.suptitle("\n".join(filter(None, [title, headline(simulation)])), fontsize=10)
        save_figure(figure, path, "the timeline", dpi=130)
    return path


def headline(simulation: Simulation) -> str:
    """The step and its parts in one line."""
    s = simulation
    parts = {"compute": s.compute_us, "exposed communication": s.exposed_communication_us, "bubble": s.bubble_us,
             "optimizer": s.optimizer_us}
    shares = ", ".join(f"{name} {us / s.step_us:.1%}" for name, us in parts.items() if us > 0)
    return f"step {format_us(s.step_us)}: {shares}; peak {format_bytes(s.peak_bytes)}"


def _lane(axes: Any, events: list[TimelineEvent], row: int, rows: Sequence[tuple[float, float, str]], scale: float,
          step_us: float,
          ) -> None:
    """rows: where each stream is, from the top, and how high."""
    for top, height, stream in rows:
        axes.broken_barh([(0, step_us / scale)], (row + top, height), facecolors="#f4f4f4")
        own = [e for e in events if e.stream == stream]
        for kind in dict.fromkeys(e.kind for e in own):
            spans = [(e.start_us / scale, (e.stop_us - e.start_us) / scale) for e in own if e.kind == kind]
            width = 0.4 if len(own) < 300 else 0.0
            axes.broken_barh(spans, (row + top, height), facecolors=COLORS.get(kind, OTHER), edgecolors="white",
                             linewidth=width)
        for e in own:
            text = e.name.split()[0]
            if (e.stop_us - e.start_us) / step_us > CHARACTER * (len(text) + 1):
                axes.text((e.start_us + e.stop_us) / 2 / scale, row + top + height / 2, text, ha="center", va="center",
                          fontsize=7, color="white", clip_on=True)


def _memory(axes: Any, simulation: Simulation, scale: float) -> None:
    size, name = _bytes_unit(simulation.peak_bytes)
    times = [us for us, _ in simulation.memory]
    below = [0.0] * len(times)
    for part, curve in simulation.parts.items():
        above = [low + nbytes / size for low, nbytes in zip(below, _at(curve, times))]
        if above != below:
            axes.fill_between([us / scale for us in times], above, below, step="post", linewidth=0, alpha=0.9, label=part,
                              color=MEMORY_COLORS.get(part, OTHER))
        below = above
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=7, borderaxespad=0.1)
    axes.axhline(simulation.peak_bytes / size, color="#444444", linewidth=0.6, linestyle="--")
    axes.annotate(f"peak {format_bytes(simulation.peak_bytes)}", (1, simulation.peak_bytes / size), ha="right",
                  va="bottom", fontsize=8, xycoords=("axes fraction", "data"))
    axes.set_ylim(0, 1.4 * simulation.peak_bytes / size or 1)
    axes.set_ylabel(f"memory ({name})")


def _at(curve: Sequence[tuple[float, int]], times: Sequence[float]) -> list[int]:
    """Bytes of a memory curve at each of these times."""
    starts = [us for us, _ in curve]
    return [curve[max(bisect.bisect_right(starts, us) - 1, 0)][1] for us in times]


def _legend(axes: Any, events: Iterable[TimelineEvent]) -> None:
    from matplotlib.patches import Patch

    kinds = {e.kind for e in events}
    shown = [kind for kind in COLORS if kind in kinds] + sorted(kinds - set(COLORS))
    if shown:
        axes.legend(handles=[Patch(color=COLORS.get(kind, OTHER), label=kind) for kind in shown], frameon=False,
                    ncols=min(len(shown), 8), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8, borderaxespad=0.2)


def _shown(lanes: int) -> list[int]:
    if lanes <= MOST_LANES:
        return list(range(lanes))
    return sorted({round(k * (lanes - 1) / (MOST_LANES - 1)) for k in range(MOST_LANES)})


def _unit(step_us: float) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in ((1e6, "s"), (1e3, "ms")) if step_us >= 2 * scale), (1.0, "us"))


def _bytes_unit(size: int) -> tuple[float, str]:
    return next(((1024.0**k, u) for k, u in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")) if size >= 1024**k), (1.0, "B"))
