"""Classes of equal groups: the repetitions of a block share one decision.

Two groups are in one class if they are equal (operations, strategies, shapes, factors, wiring), in the same phase,
at the same position in repetitions of one block, and save the same values for backward. Tying decisions narrows
the search but never changes a price: the choice of a class is charged once per instance, so the objective is exactly
the cost of the unfolded graph.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence

from passes.graph.placement_graph import PlacementGraph, Value, block_class
from passes.sharding.grouping.op_groups import OpGroup


def value_signature(value: Value) -> Hashable:
    return value.spec, value.factors, value.kind, value.trainable, value.batch


class GroupNumbers:
    """Numbers of the groups of one planning, which may have several graphs: groups have one number if they are equal (see
    above), whatever their block. Signatures are long, and every mesh asks for them again."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, tuple[PlacementGraph, list[int], list[int]]] = {}
        """By id, a graph with the numbers of its values and operations."""

    def of(self, group: OpGroup, graph: PlacementGraph) -> int:
        if id(graph) not in self._known:
            self._known[id(graph)] = graph, *self._inside(graph)
        _, values, operations = self._known[id(graph)]
        places = {v: -1 - k for k, v in enumerate(group.inputs)}
        rows = []
        for index in group.operations:
            op = graph.operations[index]
            rows.append((operations[index], *[places[v] for v in op.inputs]))
            for v in op.outputs:
                places[v] = len(places)
        return self._number((group.phase, tuple(rows), tuple([values[v] for v in group.inputs]),
                             tuple([places[v] for v in group.outputs])))

    def _inside(self, graph: PlacementGraph) -> tuple[list[int], list[int]]:
        values = [self._number(value_signature(value)) for value in graph.values]
        strategies: dict[int, int] = {}  # by id: equal calls share them
        for op in graph.operations:
            if id(op.strategies) not in strategies:
                strategies[id(op.strategies)] = self._number(op.strategies)
        return values, [self._number((op.target, op.flops, strategies[id(op.strategies)], *[values[v] for v in op.outputs]))
                        for op in graph.operations]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def classes_of(
    groups: Sequence[OpGroup], graph: PlacementGraph, fold: bool = True, marks: Sequence[Hashable] | None = None,
    known: GroupNumbers | None = None,
) -> tuple[list[int], list[str]]:
    """(class of every group, name of every class). Classes are numbered in order of appearance.

    marks: one per group; equal within a class.
    """
    known = known or GroupNumbers()
    numbers: dict[Hashable, int] = {}
    names: list[str] = []
    signatures: dict[Hashable, int] = {}
    seen: dict[Hashable, int] = {}
    result = []
    for group in groups:
        mark = None if marks is None else marks[group.index]
        signature = signatures.setdefault((known.of(group, graph), mark), len(signatures))
        place = (group.block, signature)
        ordinal = seen.get(place, 0)
        seen[place] = ordinal + 1
        key: Hashable = (block_class(group.block), signature, ordinal) if fold else group.index
        if key not in numbers:
            numbers[key] = len(numbers)
            lead = next((graph.operations[i] for i in group.operations if graph.operations[i].heavy),
                        graph.operations[group.operations[0]])
            where = block_class(group.block)
            names.append(f"{where}:{lead.name}" if where else lead.name)
        result.append(numbers[key])
    return result, names
