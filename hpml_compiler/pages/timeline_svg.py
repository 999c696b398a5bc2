"""The timeline of a simulated step and its memory as SVG."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hpml_compiler.simulate.simulation import Simulation, format_ranks
from hpml_compiler.visualize.drawings.labels import MEMORY_COLORS
from hpml_compiler.visualize.formatting import format_bytes, format_us

WIDTH, LEFT, ROW, GAP, MOST_LANES, MOST_EVENTS = 1100, 110, 16, 8, 16, 4000
KIND_COLORS = {"forward": "#3f5468", "recompute": "#9fb3c4", "offload": "#c7a76c", "backward": "#7a8fa3",
               "optimizer": "#8f6bb0"}
COLLECTIVE = "#d9b230"


def timeline_svg(found: Simulation, until_us: float = 0.0) -> str:
    """Two rows for each lane of ranks: computation, and communication. Of very many events, the longest are drawn. until_us:
    the end of the time axis, if it is later than that of the step."""
    if not found.step_us:
        return ""
    end_us = max(found.step_us, until_us)
    lanes = list(range(len(found.ranks_of_lane)))[:MOST_LANES]
    shown = [event for event in found.events if event.lane < MOST_LANES]
    shown = sorted(shown, key=lambda event: event.start_us - event.stop_us)[:MOST_EVENTS]
    scale, parts = (WIDTH - LEFT) / end_us, []
    for lane in lanes:
        top = lane * (2 * ROW + GAP)
        parts.append(_label(format_ranks(found.ranks_of_lane[lane]), top + ROW))
        parts += [f'<rect x="{LEFT}" y="{top + k * ROW}" width="{WIDTH - LEFT}" height="{ROW - 2}" fill="#f2f2f2"/>'
                  for k in (0, 1)]
    for event in shown:
        top = event.lane * (2 * ROW + GAP) + (ROW if event.stream != "compute" else 0)
        width = max((event.stop_us - event.start_us) * scale, 0.3)
        color = KIND_COLORS.get(event.kind, COLLECTIVE)
        parts.append(f'<rect x="{LEFT + event.start_us * scale:.2f}" y="{top}" width="{width:.2f}" height="{ROW - 2}" '
                     f'fill="{color}"><title>{escape(event.name)} ({escape(event.kind)}): '
                     f'{format_us(event.stop_us - event.start_us)} from {format_us(event.start_us)}</title></rect>')
    height = len(lanes) * (2 * ROW + GAP)
    kinds = {event.kind for event in shown}
    names = [(kind, color) for kind, color in KIND_COLORS.items() if kind in kinds]
    if kinds - set(KIND_COLORS):
        names.append(("communication", COLLECTIVE))
    return _svg(height + 40, [*parts, *_axis(end_us, height), *_legend(names, height + 32)])


def memory_svg(found: Simulation, limit: int | None) -> str:
    """Memory of the fullest ranks over time, by part, with the limit if it is near."""
    times = [us for us, _ in found.memory]
    if not found.step_us or not times or not found.peak_bytes:
        return ""
    top_bytes = max(found.peak_bytes * 1.1, limit if limit and limit < 3 * found.peak_bytes else 0)
    height, scale = 160, (WIDTH - LEFT) / found.step_us
    below, parts = [0.0] * len(times), [_label(format_bytes(top_bytes), 10), _label("0 B", height)]
    for part, curve in found.parts.items():
        values = dict(curve)
        above, last = [], 0
        for us, low in zip(times, below):
            last = values.get(us, last)
            above.append(low + last)
        points = _steps(times, above, found.step_us, scale, height / top_bytes, height)
        back = _steps(times, below, found.step_us, scale, height / top_bytes, height)[::-1]
        if above != below:
            corners = " ".join(f"{x:.2f},{y:.2f}" for x, y in [*points, *back])
            color = MEMORY_COLORS.get(part, "#cccccc")
            parts.append(f'<polygon points="{corners}" fill="{color}"><title>{escape(part)}</title></polygon>')
        below = above
    for nbytes, name in ((found.peak_bytes, "peak"), (limit or 0, "limit")):
        if 0 < nbytes <= top_bytes:
            y = height - nbytes * height / top_bytes
            color = "#b3001b" if name == "limit" else "#444444"
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" stroke-dasharray="4 3"/>'
                         f'<text x="{LEFT + 4}" y="{y - 3:.1f}" fill="{color}">{name} {format_bytes(nbytes)}</text>')
    names = [(part, MEMORY_COLORS.get(part, "#cccccc")) for part in found.parts]
    return _svg(height + 40, [*parts, *_axis(found.step_us, height), *_legend(names, height + 32)])


def _steps(times: Sequence[float], values: Sequence[float], end_us: float, scale: float, per_byte: float, height: int,
           ) -> list[tuple[float, float]]:
    """Corners of a curve that keeps a value until the next one."""
    found: list[tuple[float, float]] = []
    for us, value, until in zip(times, values, [*times[1:], end_us]):
        y = height - value * per_byte
        found += [(LEFT + us * scale, y), (LEFT + max(until, us) * scale, y)]
    return found


def _axis(step_us: float, y: int) -> list[str]:
    anchors = ("start", "middle", "middle", "middle", "end")
    places = [LEFT + k * (WIDTH - LEFT) / 4 for k in range(5)]
    return [f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{anchor}">{format_us(step_us * k / 4)}</text>'
            for k, (x, anchor) in enumerate(zip(places, anchors, strict=True))]


def _legend(names: Sequence[tuple[str, str]], y: int) -> list[str]:
    found, x = [], LEFT
    for name, color in names:
        found.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
                     f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    return found


def _label(text: str, y: int) -> str:
    return f'<text x="0" y="{y}">{escape(text)}</text>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -2 {WIDTH} {height + 4}" width="{WIDTH}" height="{height}" '
            f'font-family="Helvetica,Arial,sans-serif" font-size="11">{"".join(parts)}</svg>')
