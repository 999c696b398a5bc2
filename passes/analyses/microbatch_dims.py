"""Dims of a batch that number its microbatches, and strategies of operations along them.

A microbatch is every m-th row, so that the dim of rows has the factors (rows / m, m), and its index is the *inner* one. Mesh
axes split the outer one: the two never clash, and a rank's rows stay contiguous. Dims that must be split contiguously, such as
positions and tables, cannot be split along the inner factor, so that all microbatches run the same program.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from passes.analyses.dim_factors import Place
from passes.errors import BadInput
from passes.graph.placement_graph import Operation, Value, common_rows
from passes.op_rules.base import PARTIAL_MAX, Rule, Strategy

log = logging.getLogger("hpml")
Seed = tuple[int, int, int]


def rows_of(values: Sequence[Value]) -> int:
    """Rows of the batch in a graph's inputs."""
    return common_rows(v.spec.shape for v in values if v.kind == "batch")


def most_that_fit(rows: int, microbatches: int) -> int:
    """The largest number of equal microbatches of these rows, up to `microbatches`: an epoch's last batch is often smaller."""
    return max(n for n in range(1, microbatches + 1) if rows % n == 0)


def fitting_microbatches(shapes: Iterable[Sequence[int]], microbatches: int, ranks: int = 1, speaks: bool = True) -> int:
    """Number of microbatches for data of these shapes; warns where that is fewer than the options say. ranks: that share the
    rows."""
    rows = common_rows(shapes)
    on_ranks = f" on {ranks} ranks" if ranks > 1 and rows % ranks == 0 else ""
    found = most_that_fit(rows // ranks if on_ranks else rows, microbatches) if rows else microbatches
    if found < microbatches and speaks:
        own = rows // ranks if on_ranks else rows
        nearest = next((count for count in range(microbatches, own + 1) if own % count == 0), None)
        log.warning("a batch of %d rows%s is split into %d microbatches, since %d do not divide it%s", rows, on_ranks, found,
                    microbatches, "" if nearest is None else f"; {nearest} do")
    return found


def row_cuts(values: Sequence[Value], microbatches: int) -> list[tuple[Place, int]]:
    """Initial cuts of row dims, if there are any. Raises BadInput if the rows do not divide into that many microbatches."""
    rows = rows_of(values)
    if rows % microbatches:
        raise BadInput(f"a batch of {rows} rows does not go into {microbatches} microbatches", "options['microbatches']",
                       f"give {most_that_fit(rows, microbatches)}, or another number of rows")
    return [((v.index, 0), microbatches) for v in values if v.kind == "batch" and v.spec.shape[:1] == (rows,)]


def seeds(values: Sequence[Value], microbatches: int) -> list[Seed]:
    """The inner factor of the rows of every input that has rows, if views keep it in one piece. values: with factors."""
    rows = rows_of(values)
    return [(v.index, 0, len(v.factors[0]) - 1) for v in values
            if v.kind == "batch" and v.spec.shape[:1] == (rows,) and v.factors[0] and v.factors[0][-1] == microbatches]


def time_strategies(op: Operation, rule: Rule | None, splits: Sequence[frozenset[tuple[int, int]]]) -> tuple[Strategy, ...]:
    """Those strategies of an operation that are on the time axis. splits: by value, the factors that number microbatches."""
    return tuple(s for s in op.strategies if _along(op, s, splits) and same_for_all(rule, s))


def _along(op: Operation, strategy: Strategy, splits: Sequence[frozenset[tuple[int, int]]]) -> bool:
    return all(p != PARTIAL_MAX and (not isinstance(p, tuple) or p in splits[v])
               for v, p in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs))


def touches(op: Operation, strategy: Strategy, splits: Sequence[frozenset[tuple[int, int]]]) -> bool:
    """True if a strategy splits a factor that numbers microbatches."""
    return any(p in splits[v] for v, p in zip((*op.inputs, *op.outputs), strategy.inputs + strategy.outputs)
               if isinstance(p, tuple))


def same_for_all(rule: Rule | None, strategy: Strategy) -> bool:
    """True if the call is the same in all microbatches: not if it depends on its position in a range."""
    if rule is None or not (rule.ordered or rule.indexed):
        return True
    ranges = {*rule.ordered, *rule.indexed}
    return not any(isinstance(p, tuple) and ranges.intersection(letters[p[0]])
                   for letters, p in zip(rule.inputs + rule.outputs, strategy.inputs + strategy.outputs))
