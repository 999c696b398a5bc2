"""Explain why a graph is not split over ranks, so that every rank does all of its work."""
from __future__ import annotations

from math import prod

from hpml_compiler.plans.schema import GraphPlan

REPLICATED = "R"


def why_not_split(record: GraphPlan) -> str:
    """A sentence such as `graph_0 is not split; both ranks do the same work, because the batch has 1 row and ...`; empty if the
    graph is split."""
    ranks = prod(record.mesh.values())
    if ranks == 1 or record.pipeline is not None or _is_split(record):
        return ""
    who = "both ranks" if ranks == 2 else f"all {ranks} ranks"
    return f"{record.name} is not split; {who} run all of it, because {_reason(record)}"


def _is_split(record: GraphPlan) -> bool:
    placed = [parameter.placements for parameter in record.parameters.values()]
    placed += [each for operation in record.operations.values() for each in (*operation.inputs, *operation.outputs)]
    return any(placement != REPLICATED for placements in placed for placement in placements)


def _reason(record: GraphPlan) -> str:
    sizes = [size for size in record.mesh.values() if size > 1]
    axes = " or ".join(map(str, dict.fromkeys(sizes)))
    whole = {each.name: each.reason for each in record.left_whole}
    blocked = [name for name in record.parameters if name in whole]
    rows, alike = record.rows, record.microbatches is not None  # which need as many rows on each rank
    rows_fit = rows is not None and any(rows >= size and not (alike and rows % size) for size in sizes)
    found = []
    if rows is None:
        found.append("its inputs have no common number of rows")
    elif not rows_fit:
        uneven = f"the {rows} rows of the batch cannot be divided by {axes}"
        found.append("the batch has 1 row" if rows == 1 else uneven)
    if blocked:
        more = f" (and {len(blocked) - 1} more)" if len(blocked) > 1 else ""
        found.append(f"{blocked[0]}{more} cannot be split: {whole[blocked[0]]}")
    if not rows_fit and len(blocked) == len(record.parameters):
        return " and ".join(found)
    faster = f"the solver found no split faster than {record.predicted.step_time_us / 1e3:.3g} ms per step"
    return " and ".join([*found, faster])
