"""Parts of labels that all drawings share: colors of axes, words, bars and the panel of mesh axes. All text is escaped here."""
from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import graphviz

from hpml_compiler.visualize.description.placement_words import WHOLE
from hpml_compiler.visualize.description.records import (
    COMMUNICATION,
    COMPUTE,
    OPTIMIZER,
    OVERHEAD,
    RECOMPUTE,
    WAITING,
    PlanDescription,
)
from hpml_compiler.visualize.formatting import format_bytes, format_us

FONT = {"fontname": "Helvetica,Arial,sans-serif", "fontsize": "10"}
AXIS_COLORS = ("#0060a8", "#b04a00", "#00735c", "#9c3a78", "#5f5a00", "#4b4b9b")
"""Dark enough for text on white, and apart for color-blind readers (after Okabe and Ito); an axis is always named, too."""
PART_COLORS = {COMPUTE: "#3f5468", COMMUNICATION: "#d9b230", RECOMPUTE: "#9fb3c4", OPTIMIZER: "#8f6bb0", OVERHEAD: "#8c8c8c",
               WAITING: "#e8e8e8"}
MEMORY_COLORS = {"parameters": "#4878b0", "optimizer": "#8f6bb0", "gradients": "#f0a04a", "saved": "#5aa469",
                 "recomputed": "#b8dcbf", "gathered": "#a9c6e8", "transient": "#d0c060"}
SPLIT, WHOLE_COLOR, OVER = "#d7e8fb", "#f4f4f4", "#b3001b"
MOST_CHARACTERS = 160
"""Longest name in a label; tooltips have all of it."""


def axis_colors(mesh: Mapping[str, int]) -> dict[str, str]:
    return {axis: AXIS_COLORS[k % len(AXIS_COLORS)] for k, axis in enumerate(mesh)}


def escaped(text: str) -> str:
    """Text for an HTML-like label: on one line, at most MOST_CHARACTERS long."""
    flat = "".join(each if each.isprintable() else " " for each in text)
    if len(flat) > MOST_CHARACTERS:
        flat = flat[: MOST_CHARACTERS // 2 - 1] + "…" + flat[-MOST_CHARACTERS // 2:]
    return html.escape(flat)


def tooltip(text: str) -> str:
    """Text for an attribute; dot must not read its escapes."""
    return graphviz.nohtml(graphviz.escape("".join(each if each.isprintable() or each == "\n" else " " for each in text)
                                           ).replace("\n", "&#10;"))


def colored(words: Mapping[str, Sequence[str] | str], mesh: Mapping[str, int], most: int = 4) -> str:
    """Words by axis, in the axes' colors; "whole" in gray."""
    colors, found = axis_colors(mesh), []
    axes: dict[tuple[str, ...], list[str]] = {}
    for axis, own in words.items():
        axes.setdefault((own,) if isinstance(own, str) else tuple(own), []).append(axis)
    for own, names in axes.items():
        text = ", ".join(own[:most]) + (f" +{len(own) - most}" if len(own) > most else "")
        found.append(font(f"{' and '.join(names)}: {text}", colors.get(names[0], "#444444")))
    return "&#160;&#160;&#160;&#160;".join(found) or font(WHOLE, "#666666")


def font(text: str, color: str = "#333333", size: int | None = None, bold: bool = False) -> str:
    if not text:
        return ""
    inner = f"<b>{escaped(text)}</b>" if bold else escaped(text)
    points = f' point-size="{size}"' if size else ""
    return f'<font color="{color}"{points}>{inner}</font>'


def bar(parts: Mapping[str, float], colors: Mapping[str, str], whole: float, width: int = 190) -> str:
    """A bar of the parts of a whole; what is beyond the whole runs over its frame."""
    if whole <= 0:
        return ""
    cells, used = [], 0.0
    for part, value in parts.items():
        points = round(width * value / whole)
        if points >= 1:
            cells.append(f'<td bgcolor="{colors.get(part, "#8c8c8c")}" width="{points}" height="9" fixedsize="true"></td>')
            used += points
    if used < width:
        cells.append(f'<td bgcolor="#ffffff" width="{round(width - used)}" height="9" fixedsize="true"></td>')
    frame = OVER if sum(parts.values()) > whole * 1.0001 else "#777777"
    total = round(max(used, width))
    return (f'<table border="1" color="{frame}" cellborder="0" cellspacing="0" cellpadding="0" fixedsize="true" '
            f'width="{total + 2}" height="12"><tr>{"".join(cells)}</tr></table>')


def row(content: str, align: str = "left") -> str:
    return f'<tr><td align="{align}" balign="left">{content}</td></tr>'


def table(rows: Sequence[str], border: int = 1, fill: str = "#ffffff", spacing: int = 2) -> str:
    """An HTML-like label of these rows."""
    return (f'<<table border="{border}" color="#555555" cellborder="0" cellspacing="{spacing}" cellpadding="2" '
            f'bgcolor="{fill}" style="rounded">{"".join(rows)}</table>>')


def memory_text(nbytes: float, limit: int | None) -> str:
    """Bytes against the limit, in red where they are more."""
    if not limit:
        return font(f"peak {format_bytes(nbytes)}")
    share, over = nbytes / limit, nbytes > limit
    text = f"peak {format_bytes(nbytes)}, {share:.0%} of {format_bytes(limit)}"
    if over:
        return font(f"{text}: does not fit, {format_bytes(nbytes - limit)} too much", OVER, bold=True)
    return font(f"{text}, {format_bytes(limit - nbytes)} left")


def heading(found: PlanDescription, title: str, lines: Sequence[str] = ()) -> str:
    """The title with the panel of mesh axes below it, which is the legend of their colors."""
    colors = axis_colors(found.mesh)
    rows = [f'<tr><td align="left">{font(title, "#111111", 13, True)}</td></tr>',
            *(f'<tr><td align="left">{line}</td></tr>' for line in lines)]
    for axis in found.axes:
        sent = axis.communication
        kinds = ", ".join(sorted((k for k in sent.by_kind if k != "slice"), key=lambda kind: -sent.by_kind[kind])[:3])
        traffic = f"{format_us(sent.us)}, {format_bytes(sent.bytes)} a step: {kinds}" if sent.count else ""
        splits = "splits " + ", ".join(axis.splits[:6]) if axis.splits else "splits nothing"
        line = font("■ ", colors[axis.name], 14) + font(f"{axis.name} = {axis.size}", colors[axis.name], bold=True)
        line += "".join("&#160;&#160;&#160;&#160;" + font(text) for text in (splits, axis.links, traffic) if text)
        rows.append(f'<tr><td align="left">{line}</td></tr>')
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{"".join(rows)}</table>>'


def legend(colors: Mapping[str, str], shown: Mapping[str, str]) -> str:
    """Colors of a bar's parts in one line, with their figures."""
    return "&#160;&#160;&#160;".join(
        font("■ ", colors.get(part, "#8c8c8c")) + font(f"{part} {figure}".rstrip()) for part, figure in shown.items())
