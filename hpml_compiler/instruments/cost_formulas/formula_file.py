"""Save and load symbolic costs as strict JSON, so that what-if questions need neither model nor plan. No code is executed.

Quantities and terms are stored once and referenced by index; a coefficient is "3/2" or an integer.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from hpml_compiler.instruments.cost_formulas.cost_parts import CostPart, GraphTerms
from hpml_compiler.instruments.cost_formulas.step_formulas import SymbolicCost
from passes.cost_model.cost_terms import Kernel, Message, Slice, Term, Update
from passes.cost_model.formulas.polynomial_terms import Polynomial
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.json_records import from_json, read_json, to_json, write_json
from passes.sharding.search.symbolic_terms import HELD, PARTS, ByteTerm, CountedTerm, DivisibilityLimit, Quantity, SymbolicTerms

FORMAT, VERSION = "hpml formulas", 2
_TERMS: dict[str, type] = {"kernel": Kernel, "message": Message, "slice": Slice, "update": Update}


def save(cost: SymbolicCost, path: str | Path) -> None:
    """Save a symbolic cost. Raises BadInput if it uses measured prices, which are only in this machine's cache."""
    if cost.measured is not None:
        raise BadInput("formulas over measured prices cannot be written", str(path), "plan with costs=roofline")
    write_json({
        "format": FORMAT, "version": VERSION, "inputs": cost.inputs, "axes": cost.axes, "states": cost.states,
        "notes": list(cost.notes), "cluster": to_json(cost.cluster), "graphs": [_graph(graph) for graph in cost.graphs],
    }, path)


def is_formulas(data: Any) -> bool:
    """True if JSON data is a symbolic cost, of any version."""
    return isinstance(data, dict) and data.get("format") == FORMAT


def load(path: str | Path) -> SymbolicCost:
    """Load a symbolic cost written by `save`. Raises BadInput."""
    data = read_json(path)
    where, again = str(path), "make it again with `hpml explain TARGET --save FILE.json`"
    if not is_formulas(data) or data.get("version") != VERSION:
        raise BadInput(f"no {FORMAT} of version {VERSION}", where, again)
    try:
        return SymbolicCost(
            _sizes(data["inputs"]), _sizes(data["axes"]), from_json(Cluster, data["cluster"], where), int(data["states"]),
            tuple(map(_read_graph, data["graphs"])), tuple(map(str, data["notes"])),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadInput(f"not valid formulas: {error!r}", where, again) from error


def _sizes(data: dict[str, Any]) -> dict[str, int]:
    if any(type(n) is not int or n < 1 for n in data.values()):
        raise ValueError(f"sizes are whole numbers above 0, not {data}")
    return dict(data)


class _ItemNumbers:
    """Numbers distinct items in order of their first use."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def __call__(self, item: Any) -> int:
        return self.known.setdefault(item, len(self.known))


def _graph(graph: GraphTerms) -> dict[str, Any]:
    quantity, term = _ItemNumbers(), _ItemNumbers()
    bill = graph.bill
    charges = [[c.entity, c.part, term(c.term), c.count] for c in bill.charges]
    held = [[h.entity, h.part, quantity(h.bytes), h.count] for h in bill.held]
    transients = list(map(quantity, bill.transients))
    terms = [_term(each, quantity) for each in term.known]
    return {
        "name": graph.name, "overhead_us": graph.overhead_us,
        "parts": [[p.name, p.block, p.count, list(p.names)] for p in graph.parts],
        "quantities": [[[list(axes), list(powers), str(factor)] for (axes, powers), factor in q] for q in quantity.known],
        "terms": terms, "charges": charges, "held": held, "transients": transients,
        "limits": [[_polynomial(limit.factor), list(limit.axes), limit.name] for limit in bill.limits],
    }


def _term(term: Term[Quantity], quantity: Callable[[Quantity], int]) -> dict[str, Any]:
    kind = next(name for name, cls in _TERMS.items() if type(term) is cls)
    found: dict[str, Any] = {"term": kind}
    for field in fields(term):
        value = getattr(term, field.name)
        if field.name in ("flops", "bytes", "elements"):
            value = quantity(value)
        elif field.name == "outer":
            value = list(map(quantity, value))
        found[field.name] = value
    return found


def _read_graph(data: dict[str, Any]) -> GraphTerms:
    quantities = [tuple(((tuple(axes), tuple(powers)), Fraction(factor)) for axes, powers, factor in q)
                  for q in data["quantities"]]
    terms = [_read_term(each, quantities) for each in data["terms"]]
    for _, part, *_rest in data["charges"]:
        PARTS.index(part)
    for _, part, *_rest in data["held"]:
        HELD.index(part)
    return GraphTerms(
        str(data["name"]), tuple(CostPart(name, block, count, tuple(names)) for name, block, count, names in data["parts"]),
        SymbolicTerms(
            tuple(CountedTerm(entity, part, terms[k], float(count)) for entity, part, k, count in data["charges"]),
            tuple(ByteTerm(entity, part, quantities[k], float(count)) for entity, part, k, count in data["held"]),
            tuple(quantities[k] for k in data["transients"]),
            tuple(DivisibilityLimit(_read_polynomial(factor), tuple(axes), name) for factor, axes, name in data["limits"]),
        ),
        float(data["overhead_us"]),
    )


def _read_term(data: dict[str, Any], quantities: list[Quantity]) -> Term[Quantity]:
    values = dict(data)
    cls = _TERMS[values.pop("term")]
    for name in ("flops", "bytes", "elements"):
        if name in values:
            values[name] = quantities[values[name]]
    if "outer" in values:
        values["outer"] = tuple(quantities[k] for k in values["outer"])
    return cls(**values)


def _polynomial(terms: Polynomial) -> list[list[Any]]:
    return [[list(powers), str(factor)] for powers, factor in terms]


def _read_polynomial(data: list[Any]) -> Polynomial:
    return tuple((tuple(powers), Fraction(factor)) for powers, factor in data)
