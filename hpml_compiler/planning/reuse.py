"""The decisions of one graph for another of the same structure: a sequence of another length, the last rows of a data set.

Every size that a model is called with is a graph of its own. Solving for each would give nearly the same answer each time,
so the first answer is taken for all: priced and checked for the new sizes as any answer is, but not searched for again.
"""
from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpml_compiler.options import Options
from hpml_compiler.plans.schema import GraphPlan
from passes.errors import BadInput, Infeasible

if TYPE_CHECKING:
    from hpml_compiler.planning.plan_graph import Annotated, Planned

log = logging.getLogger("hpml")

Pins = dict[str, Any]


def structure(annotated: Annotated, options: Options, rows: frozenset[str] = frozenset()) -> str:
    """A hash of all that decides what should be done with a graph, except its sizes: operations, which reads what, dtypes and
    numbers of dims, and what the user asked for. rows: names of inputs that come split by rows. (Where parameters are stored
    already may rule decisions out; `decided_as` finds that.)"""
    lines = [repr(sorted(rows)), json.dumps(options.to_json(), sort_keys=True)]
    for node in annotated.gm.graph.nodes:
        value = node.meta.get("val")
        kind = (len(getattr(value, "shape", ())), str(getattr(value, "dtype", "")))
        lines.append(f"{node.name} {node.op} {node.target} {[n.name for n in node.all_input_nodes]} {kind}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def pins_of(record: GraphPlan) -> Pins:
    """What was chosen for each entity, as `place` takes it."""
    return {name: (tuple(d.inputs), tuple(d.outputs)) for name, d in record.decisions.items()}


def decided_as(record: GraphPlan, plan: Callable[[Pins], Planned]) -> Planned | None:
    """`plan` with the decisions of that record; None where they cannot be taken: sizes that an axis does not divide, or
    more bytes than the budget. Its solver's report says whose decisions they are, and claims no bound."""
    try:
        planned = plan(pins_of(record))
    except (BadInput, Infeasible) as refusal:
        log.info("the decisions of %s do not fit a graph of the same structure, which is solved for itself: %s",
                 record.name, refusal.what)
        return None
    solver = planned.record.solver.model_copy(update={"status": f"as {record.name}", "bound_us": None, "gap": None})
    return planned.with_record(planned.record.model_copy(update={"solver": solver}))
