"""The grid of a placed tensor as text and as SVG."""
from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hpml_compiler.visualize.description.device_grid import DeviceGrid, ranges
from passes.op_rules.dim_texts import parse_dims

MOST_ROWS, MOST_COLUMNS = 8, 8
COLORS = ("#cfe0f3", "#f8dcc0", "#cfe9e0", "#edd3e3", "#ece8c0", "#d9d9f2")
CELL, HIGH, LEFT, TOP = 110, 34, 130, 56


def grid_lines(grid: DeviceGrid, dims: str) -> Iterator[str]:
    """Lines such as "part 1 of 4 of columns: devices 1, 5"."""
    if not grid.dims:
        yield f"devices {ranges(next(iter(grid.parts.values())))} have all of it"
        return
    for number, (part, devices) in enumerate(grid.parts.items()):
        if number == MOST_ROWS:
            yield f"and {len(grid.parts) - MOST_ROWS} more parts"
            return
        where = ", ".join(f"part {k + 1} of {count} of {split_name(dims, dim, factor)}"
                          for k, (dim, factor, count) in zip(part, grid.dims, strict=True))
        yield f"{where}: device{'s' * (len(devices) > 1)} {ranges(devices)}"


def split_name(dims: str, dim: int, factor: int) -> str:
    """Name of a dim or of a factor of it: its role, if it is known."""
    known = parse_dims(dims)
    role = known[dim][factor][1] if dim < len(known) and factor < len(known[dim]) else ""
    return role or (f"factor {factor} of dim {dim}" if factor else f"dim {dim}")


def grid_svg(name: str, grid: DeviceGrid, dims: str) -> str:
    """The first split dim from top to bottom, the others from left to right; a color for each group of devices."""
    rows = sorted({part[:1] for part in grid.parts})
    columns = sorted({part[1:] for part in grid.parts})
    shown_rows, shown_columns = rows[:MOST_ROWS], columns[:MOST_COLUMNS]
    parts = [f'<text x="8" y="18" font-weight="bold">{escape(name)}</text>',
             f'<text x="8" y="36" fill="#555555">{escape(_caption(grid, dims))}</text>']
    for y, row in enumerate(shown_rows):
        for x, column in enumerate(shown_columns):
            devices = grid.parts[row + column]
            left, top = LEFT + x * CELL, TOP + y * HIGH
            color = COLORS[(y * len(columns) + x) % len(COLORS)]
            parts.append(f'<rect x="{left}" y="{top}" width="{CELL - 2}" height="{HIGH - 2}" fill="{color}" stroke="#777777"/>'
                         f'<text x="{left + CELL // 2}" y="{top + HIGH // 2 + 4}" text-anchor="middle">{ranges(devices)}'
                         f"<title>devices {', '.join(map(str, devices))}</title></text>")
        label = f"{split_name(dims, *grid.dims[0][:2])} {row[0] + 1}/{grid.dims[0][2]}" if grid.dims else "whole"
        parts.append(f'<text x="8" y="{TOP + y * HIGH + HIGH // 2 + 4}">{escape(label[:20])}</text>')
    left_out = len(grid.parts) - len(shown_rows) * len(shown_columns)
    height = TOP + len(shown_rows) * HIGH + (22 if left_out else 6)
    if left_out:
        parts.append(f'<text x="8" y="{height - 6}" fill="#555555">and {left_out} more parts</text>')
    width = max(LEFT + len(shown_columns) * CELL + 8, 460)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="Helvetica,Arial,sans-serif" font-size="12">{"".join(parts)}</svg>\n')


def _caption(grid: DeviceGrid, dims: str) -> str:
    if not grid.dims:
        return "each device has all of it"
    split = ", ".join(f"{split_name(dims, dim, factor)} in {count} parts over {' and '.join(axes)}"
                      for (dim, factor, count), axes in zip(grid.dims, grid.axes, strict=True))
    return split + (f"; {grid.copies} copies of each part" if grid.copies > 1 else "")
