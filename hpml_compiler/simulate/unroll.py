"""The operations of a step in the order in which they run, from a plan that may list one layer for many.

A listed operation that runs r times is spread over r layers. Forward goes through the layers upward, backward downward;
what is listed among a repeated block's operations but belongs to none runs once, beside the layer that is listed.
The layers of a block's class are numbered in the order in which its listed blocks appear.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpml_compiler.plans.schema import GraphPlan

Group = tuple[str, int]
"""(class of repeated blocks, layer); ("", 0) for what is in no repeated block."""
OUTSIDE: Group = ("", 0)


@dataclass(frozen=True, slots=True)
class Instance:
    """One run of a listed operation. position: of how many runs of it this is, in the order of execution."""

    name: str
    group: Group
    position: int
    runs: int

    @property
    def layer(self) -> int:
        return self.group[1]


def unroll(graph: GraphPlan) -> tuple[list[Instance], list[Instance]]:
    """Forward and backward instances."""
    layers = _first_layers(graph)
    phases = []
    for backward in (False, True):
        names = [name for name, operation in graph.operations.items() if operation.backward == backward]
        phases.append(_numbered(_ordered(graph, names, layers, backward)))
    return phases[0], phases[1]


def _first_layers(graph: GraphPlan) -> dict[str, Group]:
    """Block -> its class, and its number among the listed blocks of that class; of repeated blocks only."""
    found: dict[str, Group] = {}
    seen: dict[str, int] = defaultdict(int)
    for operation in graph.operations.values():
        kind = block_class(operation.block)
        if kind and operation.block not in found:
            found[operation.block] = (kind, seen[kind])
            seen[kind] += 1
    return found


def block_class(block: str) -> str:
    """`h.*` for the repetitions `h.0`, `h.1`, …; "" for a block that is not one of a list."""
    parts = block.split(".")
    return ".".join("*" if part.isdigit() else part for part in parts) if any(part.isdigit() for part in parts) else ""


def _ordered(graph: GraphPlan, names: Sequence[str], layers: dict[str, Group], backward: bool) -> list[tuple[str, Group]]:
    classes = {name: layers.get(graph.operations[name].block, OUTSIDE)[0] for name in names}
    runs = {name: graph.runs(graph.operations[name]) for name in names}
    loops = {classes[name] for name in names if runs[name] > 1}
    ordered: list[tuple[str, Group]] = []
    done: set[str] = set()
    for index, name in enumerate(names):
        kind = classes[name]
        if kind not in loops or (kind == "" and runs[name] == 1):
            if name not in done:
                ordered.append((name, layers.get(graph.operations[name].block, OUTSIDE)))
        elif kind == "":
            ordered += [(name, ("", layer)) for layer in _downward(range(runs[name]), backward)]
        elif kind not in done:
            done.add(kind)
            last = max(k for k, each in enumerate(names) if classes[each] == kind)
            loop = _loop(graph, names[index : last + 1], layers, classes, kind, loops, backward)
            done.update(each for each, _ in loop if classes[each] != kind)
            ordered += loop
    return ordered


def _loop(graph: GraphPlan, names: Sequence[str], layers: dict[str, Group], classes: dict[str, str], kind: str,
          loops: set[str], backward: bool) -> list[tuple[str, Group]]:
    """All layers of a class, with what lies between the operations of the listed one and runs once."""
    first = {name: layers[graph.operations[name].block][1] for name in names if classes[name] == kind}
    runs = {name: graph.runs(graph.operations[name]) for name in first}
    depth = max(max(runs.values()), max(first.values()) + 1)
    start = {name: max(0, min(first[name], depth - runs[name])) for name in first}
    listed = min(first.values())
    found = []
    for layer in _downward(range(depth), backward):
        for name in names:
            if name in first:
                if start[name] <= layer < start[name] + runs[name]:
                    found.append((name, (kind, layer)))
            elif layer == listed and classes[name] not in loops:
                found.append((name, layers.get(graph.operations[name].block, OUTSIDE)))
    return found


def _downward(layers: range, backward: bool) -> Iterable[int]:
    return reversed(layers) if backward else layers


def _numbered(ordered: Sequence[tuple[str, Group]]) -> list[Instance]:
    totals: dict[str, int] = defaultdict(int)
    for name, _ in ordered:
        totals[name] += 1
    seen: dict[str, int] = defaultdict(int)
    found = []
    for name, group in ordered:
        found.append(Instance(name, group, seen[name], totals[name]))
        seen[name] += 1
    return found
