"""Compare two plans: mesh, placements of parameters and values, collectives and costs."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import CollectiveTotal, GraphPlan
from hpml_compiler.visualize.formatting import format_bytes, format_mesh, format_placements, format_us

MOST_LINES = 12  # of one kind of change
ABSENT = "absent"


@dataclass(frozen=True)
class Change:
    """A change of `names` (parameters, or nodes of one class) from `before` to `after`, both as text."""

    kind: str
    names: tuple[str, ...]
    before: str
    after: str

    def __str__(self) -> str:
        first, *others = self.names
        more = f" and {len(others)} more" if others else ""
        return f"{first}{more}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class PlanDiff:
    """Structured difference of two plans; `str()` gives text. It is falsy, with all fields empty, if the plans agree.

    `settings`: mesh, cluster, torch version, number of ranks, options. `costs`: in microseconds and bytes per device by
    name, before and after. `collectives`: by kind, before and after.
    """

    settings: tuple[Change, ...] = ()
    parameters: tuple[Change, ...] = ()
    operations: tuple[Change, ...] = ()
    costs: dict[str, tuple[float, float]] = field(default_factory=dict)
    collectives: dict[str, tuple[CollectiveTotal, CollectiveTotal]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.settings, self.parameters, self.operations, self.costs, self.collectives))

    def __str__(self) -> str:
        return "\n".join(_lines(self)) or "the plans agree"


def diff(before: PlanContent, after: PlanContent) -> PlanDiff:
    """Changes from `before` to `after`. Graphs are matched by hash, else by name. Replicated axes do not count:
    "dp S(0)" on a mesh of dp alone equals "dp S(0), tp R"."""
    parameters: list[Change] = []
    operations: list[Change] = []
    for old, new in _matched(before, after):
        parameters += _grouped("parameters", _stored(old), _stored(new), {})
        operations += _grouped("operations", _computed(old), _computed(new), _classes(old) | _classes(new))
    none = CollectiveTotal(0, 0)
    kinds = dict.fromkeys([*before.collectives, *after.collectives])
    totals = {kind: (before.collectives.get(kind, none), after.collectives.get(kind, none)) for kind in kinds}
    numbers = ((before.predicted, after.predicted), (before.memory, after.memory))
    costs = {name: (value, new.model_dump()[name]) for old, new in numbers for name, value in old.model_dump().items()}
    return PlanDiff(
        settings=tuple(_settings(before, after)),
        parameters=tuple(parameters),
        operations=tuple(operations),
        costs={name: pair for name, pair in costs.items() if pair[0] != pair[1]},
        collectives={kind: pair for kind, pair in totals.items() if pair[0] != pair[1]},
    )


def _settings(before: PlanContent, after: PlanContent) -> Iterator[Change]:
    def described(plan: PlanContent) -> dict[str, str]:
        graphs = ", ".join(f"{graph.name} {graph.graph_hash[:12]}" for graph in plan.graphs)
        facts = {"mesh": format_mesh(plan.mesh), "ranks": str(plan.world_size), "torch": plan.torch_version,
                 "cluster": str(plan.cluster), "graphs": graphs}
        return facts | {f"option {name}": str(value) for name, value in plan.options.items()}

    old, new = described(before), described(after)
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield Change("settings", (name,), old.get(name, ABSENT), new.get(name, ABSENT))


def _matched(before: PlanContent, after: PlanContent) -> Iterator[tuple[GraphPlan | None, GraphPlan | None]]:
    left = list(after.graphs)
    for old in before.graphs:
        same = [new for new in left if new.graph_hash == old.graph_hash]
        same = same or [new for new in left if new.name == old.name]
        if same:
            left.remove(same[0])
        yield old, same[0] if same else None
    yield from ((None, new) for new in left)


def _stored(graph: GraphPlan | None) -> dict[str, str]:
    if graph is None:
        return {}
    return {name: format_placements(each.placements, graph.mesh) for name, each in graph.parameters.items()}


def _computed(graph: GraphPlan | None) -> dict[str, str]:
    """Placements of each node's outputs and inputs as text, such as "dp S(0) from dp S(0) | R"."""
    if graph is None:
        return {}
    texts = {name: [" | ".join(format_placements(each, graph.mesh) for each in side)
                    for side in (operation.outputs, operation.inputs)] for name, operation in graph.operations.items()}
    return {name: f"{outputs} from {inputs}" if inputs else outputs for name, (outputs, inputs) in texts.items()}


def _classes(graph: GraphPlan | None) -> dict[str, tuple[str, str]]:
    return {} if graph is None else {name: (each.class_id, each.op) for name, each in graph.operations.items()}


def _grouped(kind: str, old: dict[str, str], new: dict[str, str], classes: dict[str, tuple[str, str]]) -> list[Change]:
    """One change for each (class, before, after); parameters have no class and are grouped by before and after only."""
    groups: dict[tuple[object, str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys([*old, *new]):
        was, becomes = old.get(name, ABSENT), new.get(name, ABSENT)
        if was != becomes:
            groups[(classes.get(name), was, becomes)].append(name)
    return [Change(kind, tuple(names), was, becomes) for (_, was, becomes), names in groups.items()]


def _lines(found: PlanDiff) -> Iterator[str]:
    for title, changes in (("settings", found.settings), ("parameters", found.parameters),
                           ("operations", found.operations)):
        if changes:
            yield title
            yield from (f"  {change}" for change in changes[:MOST_LINES])
        if len(changes) > MOST_LINES:
            yield f"  and {len(changes) - MOST_LINES} more changes"
    if found.costs:
        yield "predicted"
    for name, (old, new) in found.costs.items():
        show = format_us if name.endswith("_us") else format_bytes
        ratio = f" ({new / old - 1:+.1%})" if old else ""
        yield f"  {name.removesuffix('_us')}: {show(old)} -> {show(new)}{ratio}"
    if found.collectives:
        yield "collectives"
    for kind, pair in found.collectives.items():
        texts = [f"{total.count} ({format_bytes(total.bytes)})" for total in pair]
        yield f"  {kind}: {texts[0]} -> {texts[1]}"
