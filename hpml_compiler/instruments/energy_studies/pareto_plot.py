"""Plot step time and energy of many plans with their Pareto front."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_compiler.instruments.energy_studies.pareto_front import ParetoPoint, Sweep
from hpml_compiler.visualize.formatting import format_mesh
from hpml_compiler.visualize.picture_files import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vPX*"
WITHIN = 1.3
"""Points beyond this factor of the front's largest time or energy are counted but not plotted."""

LABEL_EVERY = 0.05
"""Fraction of the plot's height, or three times that of its width: points closer to a labelled point than this get no label."""

LOG_FROM = 4.0
"""Ratio of the slowest to the fastest step above which the time axis is logarithmic."""


@dataclass(frozen=True)
class _Scale:
    """Units of the axes, chosen for short numbers."""

    per_second: float
    per_joule: float
    time_unit: str
    energy_unit: str

    @staticmethod
    def of(front: Sequence[ParetoPoint]) -> _Scale:
        long, much = front[0].step_time_s >= 1.0, front[-1].energy_j >= 1e4
        return _Scale(1.0 if long else 1e3, 1e-3 if much else 1.0, "s" if long else "ms", "kJ" if much else "J")

    def at(self, point: ParetoPoint) -> tuple[float, float]:
        return point.step_time_s * self.per_second, point.energy_j * self.per_joule


def draw(sweep: Sweep, path: Path, title: str = "") -> None:
    """Plot to the file `path` (.png, .svg, .pdf). Color is the power cap, shape the number of devices. Raises BadInput."""
    import matplotlib
    from matplotlib.figure import Figure

    front = sweep.front
    shown = [p for p in sweep.points
             if p.step_time_s <= WITHIN * front[-1].step_time_s and p.energy_j <= WITHIN * front[0].energy_j]
    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False,
                                "axes.spines.right": False}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes, scale = figure.subplots(), _Scale.of(front)
        axes.margins(x=0.27, y=0.12)
        if max(p.step_time_s for p in shown) > LOG_FROM * min(p.step_time_s for p in shown):
            _logarithmic(axes)
        _points(axes, shown, scale)
        _front(axes, front, scale)
        axes.set_xlabel(f"time of a step ({scale.time_unit})")
        axes.set_ylabel(f"energy of a step, all devices ({scale.energy_unit})")
        labels = ", ".join(dict.fromkeys(point.energy_label for point in sweep.points))
        axes.set_title(f"{title or sweep.cluster}: time and energy ({labels})", fontsize=11, loc="left")
        _legend(axes, shown, len(sweep.points) - len(shown))
        save_figure(figure, path, "the front", dpi=120)


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _colors(points: Sequence[ParetoPoint]) -> dict[float | None, tuple[float, ...]]:
    """Power cap -> color, from no cap (gray) down."""
    import matplotlib

    caps = sorted({point.power_cap_w for point in points if point.power_cap_w is not None})
    shades = matplotlib.colormaps["plasma"].resampled(len(caps) + 1)
    found: dict[float | None, tuple[float, ...]] = {cap: shades(i) for i, cap in enumerate(caps)}
    if any(point.power_cap_w is None for point in points):
        found[None] = (0.45, 0.45, 0.45, 1.0)
    return dict(reversed(found.items()))


def _markers(points: Sequence[ParetoPoint]) -> dict[int, str]:
    """Number of devices -> marker, largest first."""
    counts = sorted({point.devices for point in points}, reverse=True)
    return {count: MARKERS[i % len(MARKERS)] for i, count in enumerate(counts)}


def _points(axes: Axes, points: Sequence[ParetoPoint], scale: _Scale) -> None:
    colors, markers = _colors(points), _markers(points)
    for point in points:
        axes.plot(*scale.at(point), markers[point.devices], color=colors[point.power_cap_w], markersize=7, alpha=0.75,
                  markeredgewidth=0)


def _legend(axes: Axes, points: Sequence[ParetoPoint], outside: int) -> None:
    for count, marker in _markers(points).items():
        axes.plot([], [], marker, color="black", fillstyle="none", label=f"{count} device{'s' if count > 1 else ''}")
    for cap, color in _colors(points).items():
        axes.plot([], [], "o", color=color, label="no cap" if cap is None else f"cap {cap:g} W")
    axes.plot([], [], color="black", linewidth=1, label="front")
    if outside:
        axes.plot([], [], " ", label=f"{outside} worse plans\nnot shown")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _front(axes: Axes, front: Sequence[ParetoPoint], scale: _Scale) -> None:
    """Plot the front as a staircase, since no plans between its points are known, with mesh and cap where there is space."""
    times, energies = zip(*map(scale.at, front))
    axes.step(times, energies, where="post", color="black", linewidth=1, zorder=0)
    axes.plot(times, energies, "o", color="black", fillstyle="none", markersize=11, linestyle="none")
    for point in _labelled(axes, front, scale):
        cap = "no cap" if point.power_cap_w is None else f"{point.power_cap_w:g} W"
        # There are no points below and to the left of the front.
        axes.annotate(f"{format_mesh(point.mesh)}, {cap}", scale.at(point), xytext=(-7, -6), textcoords="offset points",
                      fontsize=8, ha="right", va="top")


def _labelled(axes: Axes, front: Sequence[ParetoPoint], scale: _Scale) -> list[ParetoPoint]:
    """Points whose labels do not overlap, fastest first."""
    places: list[tuple[float, float]] = []
    chosen = []
    axes.autoscale_view()
    for point in front:
        x, y = axes.transAxes.inverted().transform(axes.transData.transform(scale.at(point)))
        if all(abs(x - a) > 3 * LABEL_EVERY or abs(y - b) > LABEL_EVERY for a, b in places):
            places.append((x, y))
            chosen.append(point)
    return chosen
