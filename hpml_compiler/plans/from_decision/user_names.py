"""Operations that a record lists, and names of its values: parameters and arguments have the user's names."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpml_compiler.plans.schema import ROOT
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.graph_signature import GraphInput
from passes.graph.module_blocks import assign_modules
from passes.graph.placement_graph import block_class
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.grouping.op_groups import OpGroup


@dataclass(frozen=True)
class UserNames:
    """Listed operation groups and the names of values and blocks. groups: the listed groups by class. values, blocks: names by
    index of the value and of the operation.

    A value of an operation that is not listed has the name of the listed operation that represents it.
    """

    groups: dict[int, list[OpGroup]]
    values: tuple[str, ...]
    blocks: tuple[str, ...]


def listing(annotated: AnalyzedGraph, problem: PlacementProblem, once: bool) -> UserNames:
    """List all operation groups of a graph, or one group per class if `once`."""
    groups = _one_per_class(problem) if once else {}
    stands_for: dict[int, int] = {}
    for c in problem.groups:
        number = problem.entities.of_group[c.index]
        if once:
            stands_for.update(zip(c.operations, groups[number][0].operations, strict=True))
        else:
            groups.setdefault(number, []).append(c)
    operations = annotated.graph.operations
    inputs = input_names(annotated.interface.positions, annotated.inputs, {op.name for op in operations})
    modules = {node.name: path for node, path in assign_modules(annotated.gm).items()}
    return UserNames(
        groups,
        tuple(inputs.get(v.name, v.name) if v.producer is None else operations[stands_for.get(v.producer, v.producer)].name
              for v in annotated.graph.values),
        tuple(op.block or modules[op.name] or ROOT for op in operations),
    )


def _one_per_class(problem: PlacementProblem) -> dict[int, list[OpGroup]]:
    """One group per class: the group in the first of the equal blocks if there is one, so that one layer is listed in full."""
    first: dict[str, str] = {}
    found: dict[int, list[OpGroup]] = {}
    for c in problem.groups:
        block = first.setdefault(block_class(c.block), c.block)
        listed = found.setdefault(problem.entities.of_group[c.index], [c])
        if c.block == block != listed[0].block:
            listed[0] = c
    return found


def input_names(positions: Mapping[str, int], inputs: Sequence[GraphInput], taken: set[str]) -> dict[str, str]:
    """Map placeholders to the user's names of parameters and arguments, unless unknown or an operation's name (`taken`)."""
    names = {placeholder: _user_name(inputs[position]) for placeholder, position in positions.items()}
    return {placeholder: name for placeholder, name in names.items() if name and name not in taken}


def _user_name(described: GraphInput) -> str:
    """Turn Dynamo's name of an argument, `L['batch']['ids']`, into `batch['ids']`."""
    if described.kind == "parameter":
        return described.name
    found = re.fullmatch(r"[LG]\['(\w+)'\](.*)", described.name) if described.kind == "batch" else None
    return "".join(found.groups()) if found else ""
