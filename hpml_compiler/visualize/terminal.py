"""Text for terminals: as wide as COLUMNS or the terminal, else 80 columns, in characters that its encoding has."""
from __future__ import annotations

import io
import shutil
import sys
import textwrap

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

FEWEST, LABEL = 60, 13


def columns() -> int:
    """Columns of the terminal, at least FEWEST: a narrower terminal wraps the lines itself."""
    return max(shutil.get_terminal_size((80, 24)).columns, FEWEST)


def show(item: RenderableType) -> None:
    """Print in color on a terminal, as plain text elsewhere."""
    if sys.stdout.isatty():
        Console(width=columns(), highlight=False).print(item)
    else:
        print(as_text(item, encoding=sys.stdout.encoding))


def as_text(item: RenderableType, width: int | None = None, encoding: str = "utf-8") -> str:
    """Plain text of at most `width` columns (default: the terminal's), in characters that the encoding has."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8", errors="replace", write_through=True)
    Console(file=file, width=width or columns(), color_system=None, force_terminal=False, force_jupyter=False,
            highlight=False).print(item)
    file.seek(0)
    return "\n".join(line.rstrip() for line in file.read().splitlines())


def labelled(label: str, text: str) -> RenderableType:
    """A line with a label, whose text wraps in its own column."""
    grid = Table.grid(padding=0, expand=False)
    grid.add_column(width=LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(text))
    return grid


def wrapped(text: str, width: int | None = None) -> str:
    """Wrap lines longer than `width` (default: the terminal's); continuation lines are indented by two more."""
    width = width or columns()
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [""]
    return "\n".join(lines)
