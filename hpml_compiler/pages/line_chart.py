"""Line charts of figures by step as SVG: one line for each run."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from hpml_compiler.visualize.drawings.labels import AXIS_COLORS

WIDTH, HEIGHT, LEFT, BELOW, MOST_POINTS = 1100, 170, 110, 18, 600
LINE = 14
"""Height of a line of text."""
Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], text: Callable[[float], str], limits: Mapping[str, float] | None = None) -> str:
    """Lines by name over steps, with the axes' ends in `text`. limits: name -> a level that is drawn across, if it is near.
    Figures that are not finite leave a gap. Empty if there is nothing to draw."""
    known = [(x, y) for points in series.values() for x, y in points if math.isfinite(y)]
    if not known:
        return ""
    left, right = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    near = {name: level for name, level in (limits or {}).items() if level <= 3 * high}
    low, high = (min(low, 0.0) if low < 0.5 * high else low), max([high, *near.values()])
    margin = 0.06 * (high - low or abs(high) or 1.0)
    low, high = low - margin * (low != 0), high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (x - left) / ((right - left) or 1.0) * (WIDTH - LEFT - 8),
                HEIGHT - (y - low) / (high - low) * (HEIGHT - 8))

    parts = [f'<rect x="{LEFT}" y="0" width="{WIDTH - LEFT}" height="{HEIGHT}" fill="#f7f7f7"/>',
             _text(0, 12, text(high)), _text(0, HEIGHT, text(low)), _text(LEFT, HEIGHT + 14, f"step {left:.0f}"),
             _text(WIDTH, HEIGHT + 14, f"{right:.0f}", "end")]
    labels: list[float] = []
    for name, level in near.items():
        _, y = place(left, level)
        label = y - 3
        while any(abs(label - other) < LINE for other in labels):  # equal budgets of several runs
            label += LINE
        labels.append(label)
        parts += [f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#b3001b" stroke-dasharray="4 3"/>',
                  _text(WIDTH, label, f"{name} {text(level)}", "end", "#b3001b")]
    x = LEFT
    for number, (name, points) in enumerate(series.items()):
        color = AXIS_COLORS[number % len(AXIS_COLORS)]
        parts += _line(name, [place(*each) if math.isfinite(each[1]) else None for each in thinned(points)], color)
        if len(series) > 1:
            parts.append(f'<rect x="{x}" y="{HEIGHT + 21}" width="10" height="10" fill="{color}"/>')
            parts.append(_text(x + 14, HEIGHT + 30, name))
            x += 30 + 7 * len(name)
    height = HEIGHT + BELOW + 16 * (len(series) > 1)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="Helvetica,Arial,sans-serif" font-size="11">{"".join(parts)}</svg>')


def _line(name: str, corners: Sequence[tuple[float, float] | None], color: str) -> list[str]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for corner in corners:
        if corner is None:
            pieces.append([])
        else:
            pieces[-1].append(corner)
    title = f"<title>{escape(name)}</title>"
    found = []
    for piece in pieces:
        if len(piece) == 1:
            found.append(f'<circle cx="{piece[0][0]:.1f}" cy="{piece[0][1]:.1f}" r="2.5" fill="{color}">{title}</circle>')
        elif piece:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            found.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6">{title}</polyline>')
    return found


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most about MOST_POINTS points: of each stretch, the lowest and the highest one, in order."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    found: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        part = points[begin:begin + size]
        ends = {min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])}
        found += sorted(ends)
    return found


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
