"""Roles of the dims of values ("batch", "heads", "columns"), for people: a plan names them beside its placements.

Rules say which role a letter has for their operator (`Rule.roles`): attention knows heads, an embedding its vocabulary. A
letter that stands in several dims is one index that runs through them, so dims that letters connect have one role. The dims of
a weight are named by the product that reads it: "rows" are summed over, "columns" stay in its result, unless they have a role
such as "heads" or "vocabulary". A dim that no rule knows has none.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from passes.graph.placement_graph import Operation, PlacementGraph
from passes.graph.step_phase import FORWARD
from passes.op_rules.base import Factors, Letter, Rule, letter_segments
from passes.op_rules.dim_texts import BATCH_ROLE, Roles, format_dims

Place = tuple[int, int, int]
"""(value, dim, factor)"""
Known = dict[Hashable, dict[tuple[Letter, int], list[tuple[int, int, int]]]]
"""Places of a rule's letters, kept for equal calls."""
MATRICES = "matrices"
"""Role of the letter that numbers the pairs of matrices of one product: experts where weights are among them, else heads."""
ORDER = (BATCH_ROLE, "experts", "heads", "vocabulary", "sequence", "classes", "channels", "features")
"""The role of dims that have several is the first of them."""
OF_WEIGHTS = frozenset(("experts", "heads", "vocabulary", "classes"))
"""Roles that say more of a weight's dim than rows and columns."""


@dataclass(frozen=True)
class DimRoles:
    """Roles of the dims of a graph's values. weights: of parameters by rows and columns."""

    graph: PlacementGraph
    known: dict[Place, str]
    weights: dict[Place, str]

    def text(self, v: int) -> str:
        """Sizes and roles of a value's dims."""
        return self._text(v, self.of_value(v))

    def parameter_text(self, v: int) -> str:
        """Sizes and roles of a parameter's dims, with its rows and columns."""
        return self._text(v, self.of_parameter(v))

    def _text(self, v: int, roles: Roles) -> str:
        value = self.graph.values[v]
        return format_dims(value.spec.shape, value.factors, roles)

    def of_value(self, v: int) -> Roles:
        return tuple(tuple(self.known.get((v, dim, k), "") for k in range(len(row)))
                     for dim, row in enumerate(self.graph.values[v].factors))

    def of_parameter(self, v: int) -> Roles:
        return tuple(tuple(role if role in OF_WEIGHTS else self.weights.get((v, dim, k), role) for k, role in enumerate(row))
                     for dim, row in enumerate(self.of_value(v)))


def dim_roles(graph: PlacementGraph, rules: Sequence[Rule | None]) -> DimRoles:
    """The roles of the dims of all values. rules: of the graph's operations."""
    root, weights = dict[Place, Place](), graph.weights

    def find(place: Place) -> Place:
        while (above := root.setdefault(place, place)) != place:
            root[place] = root[above]
            place = above
        return place

    seeds: list[tuple[Place, str]] = [((v.index, *place), "batch") for v in graph.values for place in v.batch]
    known: Known = {}
    for op, rule in zip(graph.operations, rules, strict=True):
        if rule is None:
            continue
        ports = (*op.inputs, *op.outputs)
        for letter, places in _places(rule, [graph.values[v].factors for v in ports], known).items():
            first = find((ports[places[0][0]], *places[0][1:]))
            for port, dim, factor in places[1:]:
                root[find((ports[port], dim, factor))] = first
            if role := rule.roles.get(letter[0]):
                if role == MATRICES:
                    role = "heads" if weights.isdisjoint(op.inputs) else "experts"
                seeds.append((first, role))
    of: dict[Place, str] = {}
    for place, role in seeds:
        top = find(place)
        of[top] = min(of.get(top, role), role, key=ORDER.index)
    found = {place: of.get(find(place), "") for place in list(root)}
    return DimRoles(graph, _named_by_size(graph, found), _weights(graph, rules, known))


def _places(rule: Rule, factors: Sequence[Factors], known: Known,
            ) -> dict[tuple[Letter, int], list[tuple[int, int, int]]]:
    """(operand or result, dim, factor) of each factor of each letter, as (letter, number of the factor)."""
    key = id(rule), tuple(factors)
    if key not in known:
        segments: dict[Letter, list[tuple[int, int, int, tuple[int, ...]]]] = {}
        for port, letters in enumerate((*rule.inputs, *rule.outputs)):
            for letter, dim, start, own in letter_segments(letters, rule.sizes, factors[port]):
                segments.setdefault(letter, []).append((port, dim, start, own))
        known[key] = {
            (letter, k): [(port, dim, start + k) for port, dim, start, _ in places]
            for letter, places in segments.items() if len({own for *_, own in places}) == 1
            for k in range(len(places[0][3]))}
    return known[key]


def _named_by_size(graph: PlacementGraph, found: dict[Place, str]) -> dict[Place, str]:
    """Classes that a loss picks from are the vocabulary where an embedding has one of that size."""
    def size(place: Place) -> int:
        return graph.values[place[0]].spec.shape[place[1]]

    vocabularies = {size(place) for place, role in found.items() if role == "vocabulary"}
    return {place: "vocabulary" if role == "classes" and size(place) in vocabularies else role for place, role in found.items()}


def _weights(graph: PlacementGraph, rules: Sequence[Rule | None], known: Known) -> dict[Place, str]:
    """"rows" or "columns" for the dims of parameters that a product of forward reads, through views and casts."""
    weights, found = graph.weights, {}
    for value in graph.values:
        if value.kind != "parameter":
            continue
        for dim, row in enumerate(value.factors):
            for factor in range(len(row)):
                role = _read_as(graph, rules, known, weights, (value.index, dim, factor))
                if role:
                    found[value.index, dim, factor] = role
    return found


def _read_as(graph: PlacementGraph, rules: Sequence[Rule | None], known: Known, weights: set[int],
             start: Place) -> str:
    left, seen = [start], {start}
    while left:
        v, dim, factor = left.pop()
        for index in graph.values[v].users:
            op, rule = graph.operations[index], rules[index]
            if op.phase != FORWARD or rule is None:
                continue
            ports = (*op.inputs, *op.outputs)
            for (letter, _), places in _places(rule, [graph.values[p].factors for p in ports], known).items():
                if not any((ports[port], d, k) == (v, dim, factor) for port, d, k in places):
                    continue
                if op.heavy:
                    if role := _of_letter(op, rule, letter):
                        return role
                    continue
                for port, d, k in places:
                    place = ports[port], d, k
                    if port >= len(op.inputs) and ports[port] in weights and place not in seen:
                        seen.add(place)
                        left.append(place)
    return ""


def _of_letter(op: Operation, rule: Rule, letter: Letter) -> str:
    """The role of a weight's dim in a product."""
    rows, columns = ("input channels", "output channels") if op.kind == "convolution" else ("rows", "columns")
    if op.kind == "embedding":
        return ""
    if letter in rule.summed and not any(letter in row for tensor in rule.outputs for row in tensor):
        return rows
    operands = sum(any(letter in row for row in tensor) for tensor in rule.inputs)
    return columns if operands == 1 or op.kind == "convolution" else ""
