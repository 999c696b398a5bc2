"""Reuse the decisions of one graph for another of the same structure: another sequence length, the last rows of a data set.

Every size that a model is called with is a graph of its own. Solving each would give nearly the same answer, so the first
answer is reused for all: priced and checked for the new sizes as any answer is, but not searched for again.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Protocol

from hpml_compiler.options import Options
from hpml_compiler.plans.schema import DecisionRecord
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.sharding.formulation.problem_entities import Pin

Pins = dict[str, Pin]


class SavedDecisions(Protocol):
    """The decisions for a graph, with the name of the plan that they are from."""

    @property
    def name(self) -> str: ...

    @property
    def mesh(self) -> Mapping[str, int]: ...

    @property
    def decisions(self) -> Mapping[str, DecisionRecord]: ...


def structural_hash(annotated: AnalyzedGraph, options: Options, rows: frozenset[str] = frozenset()) -> str:
    """Hash of everything that determines a graph's decisions except its sizes: operations, their inputs, dtypes, numbers of
    dims, and the user's options. rows: names of inputs that are sharded by rows. (Stored placements of parameters may rule
    decisions out; `plan_graph` finds that.)"""
    lines = [repr(sorted(rows)), json.dumps(options.to_json(), sort_keys=True)]
    for node in annotated.gm.graph.nodes:
        value = node.meta.get("val")
        kind = (len(getattr(value, "shape", ())), str(getattr(value, "dtype", "")))
        lines.append(f"{node.name} {node.op} {node.target} {[n.name for n in node.all_input_nodes]} {kind}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def reused_status(record: SavedDecisions) -> str:
    """The solver status of a plan that reuses another one's decisions."""
    return f"as {record.name}"


def decisions_of(record: SavedDecisions) -> Pins:
    """The choice for each entity, as pins for the search."""
    return {name: (tuple(d.inputs), tuple(d.outputs)) for name, d in record.decisions.items()}
