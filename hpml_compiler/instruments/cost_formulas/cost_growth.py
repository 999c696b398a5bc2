"""Text reports on scaling: memory and FLOPs as formulas, and the effect of doubling or changing sizes."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy

from hpml_compiler.instruments.cost_formulas.step_formulas import StepCost, SymbolicCost
from hpml_compiler.visualize.formatting import format_bytes, format_count, format_mesh, format_us
from passes.errors import BadInput

MOST_TERMS = 6
TIMES = ("step_time_us", "compute_us", "communication_us", "optimizer_us")


def growth(cost: SymbolicCost, name: str | None = None) -> str:
    """Report the formulas of the whole step or of `name` (a block, node or parameter), and the factors of time and memory
    when each size is doubled."""
    now, formulas = cost.evaluate(name, check=False), cost.formulas(name)
    lines = [f"{name or 'step'} per device, at {_sizes(cost.base)}, on {format_mesh(cost.axes)} of {cost.cluster}", ""]
    held = [(part, now.memory_bytes[part], expression) for part, expression in formulas.memory_bytes.items()]
    rows = [(_held(part), format_bytes(size), _formula(cost, expression, format_bytes)) for part, size, expression in held
            if part != "peak" and size]
    rows += [("FLOPs", format_count(round(now.flops)), _formula(cost, formulas.flops, lambda n: format_count(round(n)))),
             ("sent", format_bytes(now.sent_bytes), _formula(cost, formulas.sent_bytes, format_bytes))]
    lines += _table([("", "now", "grows as"), *(row for row in rows if row[2] != "0")])
    lines += ["", *_table([("", "now", *(f"{size} x2" for size in cost.base)), *_doubled(cost, name, now)])]
    lines += ["", *(f"note: {note}" for note in cost.notes)] if cost.notes else []
    return "\n".join(lines)


def what_if(cost: SymbolicCost, name: str | None = None, **options: Any) -> str:
    """Report time and memory now and at other sizes. options: those of `SymbolicCost.evaluate`."""
    now, then = cost.evaluate(name), cost.evaluate(name, **options)
    changed = {each: size for each, size in options.items() if each in cost.base}
    rows = [(_label(each), format_us(getattr(now, each)), format_us(getattr(then, each)),
             _ratio(getattr(now, each), getattr(then, each))) for each in TIMES]
    rows += [(_held(part), format_bytes(size), format_bytes(then.memory_bytes[part]), _ratio(size, then.memory_bytes[part]))
             for part, size in now.memory_bytes.items()]
    rows += [("FLOPs", format_count(round(now.flops)), format_count(round(then.flops)), _ratio(now.flops, then.flops)),
             ("sent", format_bytes(now.sent_bytes), format_bytes(then.sent_bytes), _ratio(now.sent_bytes, then.sent_bytes))]
    given = options.get("cluster")
    other = cost.cluster_for(math.prod({**cost.base, **changed}[axis] for axis in cost.axes)) if given is None else given
    head = f"{name or 'step'} per device, every placement as in the plan at {_sizes(cost.base)}"
    where = f"on {cost.cluster}" + (f", then on {other}" if str(other) != str(cost.cluster) else "")
    lines = [head, where, "", *_table([("", "now", _sizes(changed) or "now", "factor"), *rows])]
    return "\n".join([*lines, *([""] if cost.notes else []), *(f"note: {note}" for note in cost.notes)])


def _doubled(cost: SymbolicCost, name: str | None, now: StepCost) -> Iterator[tuple[str, ...]]:
    others = [_or_none(cost, name, {size: 2 * n}) for size, n in cost.base.items()]
    for each in TIMES:
        yield (_label(each), format_us(getattr(now, each)),
               *("-" if o is None else _ratio(getattr(now, each), getattr(o, each)) for o in others))
    for part, size in now.memory_bytes.items():
        yield (_held(part), format_bytes(size), *("-" if o is None else _ratio(size, o.memory_bytes[part]) for o in others))


def _or_none(cost: SymbolicCost, name: str | None, sizes: dict[str, int]) -> StepCost | None:
    """Cost at other sizes; None if the plan's placements do not divide these sizes."""
    try:
        return cost.evaluate(name, cluster=None, check=True, **sizes)
    except BadInput:
        return None


def _formula(cost: SymbolicCost, expression: sympy.Expr, format_number: Callable[[float], str]) -> str:
    """Format a sum of products as "9.0 MiB x (batch/4) / (dp/2) + ...", largest first; numbers are current values of terms."""
    at = [(cost.symbols[each], size) for each, size in cost.base.items()]
    terms = sorted(((float(term.subs(at)), term) for term in sympy.Add.make_args(sympy.expand(expression))),
                   key=lambda pair: -abs(pair[0]))
    shown = [format_number(now) + _powers(cost, term) if now >= 0 else f"-{format_number(-now)}{_powers(cost, term)}"
             for now, term in terms[:MOST_TERMS] if now]
    rest = sum(now for now, _ in terms[MOST_TERMS:])
    return " + ".join([*shown, *([f"{format_number(rest)} in {len(terms) - MOST_TERMS} more terms"] if rest else [])]) or "0"


def _powers(cost: SymbolicCost, term: sympy.Expr) -> str:
    """Format the powers of a term's symbols, each relative to its size in the plan."""
    powers = term.as_powers_dict()
    above, below = [], []
    for name, symbol in cost.symbols.items():
        if power := int(powers.get(symbol, 0)):
            text = f"({name}/{cost.base[name]})" + (f"^{abs(power)}" if abs(power) > 1 else "")
            (above if power > 0 else below).append(text)
    return "".join(f" x {each}" for each in above) + "".join(f" / {each}" for each in below)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Align columns: names and formulas to the left, numbers to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    formula = rows[0][-1] == "grows as"
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for k in range(1, len(row)):
            cells.append(row[k] if formula and k == len(row) - 1 else row[k].rjust(widths[k]))
        yield "  ".join(cells).rstrip()


def _sizes(sizes: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _label(field: str) -> str:
    return field.removesuffix("_us").replace("_", " ")


def _held(part: str) -> str:
    # A formula's peak is the sum of all parts and the largest transient; a plan's peak is that of its memory trace.
    return {"optimizer": "optimizer state", "peak": "all at once"}.get(part, part)


def _ratio(before: float, after: float) -> str:
    return f"x{after / before:.3g}" if before else "-" if not after else "new"
