"""Parts of HTML pages: escaped text, tables that sort, inline SVG, and the frame of a page."""
from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

STYLE = """
body{font:14px/1.45 Helvetica,Arial,sans-serif;margin:0 auto;max-width:1240px;padding:12px 16px 60px;color:#222}
h1{font-size:20px;margin:8px 0}h2{font-size:16px;margin:28px 0 6px;border-bottom:1px solid #ddd}
table{border-collapse:collapse}th,td{padding:3px 10px 3px 0;text-align:left;vertical-align:top}
th{border-bottom:1px solid #999}th.sorts{cursor:pointer}th.sorts:hover{text-decoration:underline}
td.number,th.number{text-align:right;white-space:nowrap}
.wide{overflow-x:auto;max-width:100%}.wide svg{max-width:none}.over{color:#b3001b;font-weight:bold}
details{margin:6px 0;border:1px solid #ccc;border-radius:5px;padding:6px 10px}summary{cursor:pointer;font-weight:bold}
pre{background:#f5f5f5;padding:8px;overflow-x:auto}g.node{cursor:pointer}.quiet{color:#666}
"""
SCRIPT = """
document.querySelectorAll('th.sorts').forEach(function(head){head.addEventListener('click',function(){
 var body=head.closest('table').tBodies[0],column=head.cellIndex,up=head.dataset.up!=='1';head.dataset.up=up?'1':'0';
 Array.from(body.rows).sort(function(a,b){var x=a.cells[column].dataset.value,y=b.cells[column].dataset.value;
  var order=x!==undefined&&y!==undefined?x-y:a.cells[column].textContent.localeCompare(b.cells[column].textContent);
  return up?order:-order}).forEach(function(row){body.appendChild(row)})})});
document.querySelectorAll('#overview g.node').forEach(function(node){node.addEventListener('click',function(){
 var block=document.querySelector('details[data-node="'+node.id+'"]');
 if(block){block.open=true;block.scrollIntoView({behavior:'smooth'})}})});
"""


def text(value: object) -> str:
    return html.escape(str(value))


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page. Nothing in it is loaded from elsewhere, which its policy forbids, too."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n<body>\n'
            + "\n".join(parts) + f"\n<script>{SCRIPT}</script></body></html>\n")


def section(title: str, *parts: str) -> str:
    return f"<h2>{text(title)}</h2>\n" + "\n".join(part for part in parts if part)


Cell = str | tuple[str, float]
"""Text, or a figure: its text and the number that it sorts by."""


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], sorts: bool = False) -> str:
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    figures = [any(isinstance(row[k], tuple) for row in rows) for k in range(len(heads))]
    top = "".join(f'<th class="{"sorts " * sorts}{"number" * figure}">{text(head)}</th>'
                  for head, figure in zip(heads, figures))
    lines = "".join("<tr>" + "".join(_cell(cell, figure) for cell, figure in zip(row, figures)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(cell: Cell, figure: bool) -> str:
    if isinstance(cell, tuple):
        return f'<td class="number" data-value="{cell[1]:.17g}">{text(cell[0])}</td>'
    return f'<td{" class=number data-value=0" * figure}>{text(cell)}</td>'


def picture(svg: str, identifier: str = "") -> str:
    """The picture of an SVG file, within a page."""
    body = re.sub(r"^.*?(?=<svg)", "", svg, count=1, flags=re.DOTALL)
    return f'<div class="wide"{f" id={identifier}" if identifier else ""}>{body}</div>'


def details(title: str, body: str, node: str = "") -> str:
    return f'<details data-node="{text(node)}"><summary>{text(title)}</summary>{body}</details>'
