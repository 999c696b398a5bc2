"""Compare two plans: mesh, placements of parameters and values, collectives and costs."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import ROOT, CollectiveTotal, GraphPlan, ParameterPlan
from hpml_compiler.visualize.description.describe_plan import describe
from hpml_compiler.visualize.description.placement_words import value_words, words_text
from hpml_compiler.visualize.description.records import ModuleSummary, PlanDescription
from hpml_compiler.visualize.formatting import format_bytes, format_joules, format_mesh, format_placements, format_us
from passes.graph.placement_graph import block_class
from passes.json_records import to_json

N = TypeVar("N", int, float)
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
class ModuleChange:
    """A class of modules whose time (of compute and communication), memory or sharding changes."""

    name: str
    before_us: float
    after_us: float
    before_bytes: int
    after_bytes: int
    before: str
    after: str

    def __str__(self) -> str:
        sharding = f"; {self.before} -> {self.after}" if self.before != self.after else ""
        memory = f", weights and saved {format_bytes(self.before_bytes)} -> {format_bytes(self.after_bytes)}" * (
            self.before_bytes != self.after_bytes)
        return f"{self.name}: {format_us(self.before_us)} -> {format_us(self.after_us)}{memory}{sharding}"


@dataclass(frozen=True)
class PlanDiff:
    """Structured difference of two plans; `str()` gives text. It is falsy, with all fields empty, if the plans agree.

    `settings`: mesh, cluster, its hardware, torch version, number of ranks, options. `costs`: in microseconds and bytes
    per device by name, before and after. `collectives`: by kind, before and after. `parts`, `peak`: µs of a step and bytes at
    the memory peak by part, before and after; `modules`: what accounts for them, the largest change of time first.
    """

    settings: tuple[Change, ...] = ()
    parameters: tuple[Change, ...] = ()
    operations: tuple[Change, ...] = ()
    costs: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    collectives: dict[str, tuple[CollectiveTotal, CollectiveTotal]] = field(default_factory=dict)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    peak: dict[str, tuple[int, int]] = field(default_factory=dict)
    modules: tuple[ModuleChange, ...] = ()

    def __bool__(self) -> bool:
        return any((self.settings, self.parameters, self.operations, self.costs, self.collectives, self.parts, self.peak,
                    self.modules))

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
    old, new = describe(before), describe(after)
    return PlanDiff(
        parts=_changed(_parts(old), _parts(new)), peak=_changed(old.memory, new.memory),
        modules=tuple(_modules(old, new)),
        settings=tuple(_settings(before, after)),
        parameters=tuple(parameters),
        operations=tuple(operations),
        costs={name: pair for name, pair in costs.items() if pair[0] != pair[1] and name != "energy_label"},
        collectives={kind: pair for kind, pair in totals.items() if pair[0] != pair[1]},
    )


def _parts(found: PlanDescription) -> dict[str, float]:
    return {part: sum(step.parts.get(part, 0.0) for step in found.steps)
            for part in dict.fromkeys(part for step in found.steps for part in step.parts)}


def _changed(old: Mapping[str, N], new: Mapping[str, N]) -> dict[str, tuple[N, N]]:
    """Figures by part that differ; a part that is absent is 0."""
    pairs = {part: (old.get(part, 0), new.get(part, 0)) for part in dict.fromkeys([*old, *new])}
    return {part: pair for part, pair in pairs.items() if pair[0] != pair[1]}  # pyright: ignore[reportReturnType]


def _modules(old: PlanDescription, new: PlanDescription) -> list[ModuleChange]:
    """Changes by class of modules, summed over stages, so that plans with different stages can be compared."""
    sides = [defaultdict(list), defaultdict(list)]
    for side, found in zip(sides, (old, new), strict=True):
        for each in (each for step in found.steps for each in step.modules):
            side[block_class(each.path) or ROOT].append(each)
    found = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        was, becomes = (_total(side.get(name, [])) for side in sides)
        if was != becomes:
            found.append(ModuleChange(name, was[0], becomes[0], was[1], becomes[1], was[2], becomes[2]))
    return sorted(found, key=lambda each: -abs(each.after_us - each.before_us))


def _total(modules: Sequence[ModuleSummary]) -> tuple[float, int, str]:
    words = dict.fromkeys(words_text({axis: ", ".join(own[:3]) for axis, own in each.sharding.items()}) for each in modules)
    return (sum(each.compute_us + each.communication_us for each in modules),
            sum(each.parameter_bytes + each.saved_bytes for each in modules), " or ".join(words) or ABSENT)


def _settings(before: PlanContent, after: PlanContent) -> Iterator[Change]:
    def described(plan: PlanContent) -> dict[str, str]:
        graphs = ", ".join(f"{graph.name} {graph.graph_hash[:12]}" for graph in plan.graphs)
        facts = {"mesh": format_mesh(plan.mesh), "ranks": str(plan.world_size), "torch": plan.torch_version,
                 "cluster": str(plan.cluster), "graphs": graphs}
        return facts | {f"option {name}": str(value) for name, value in plan.options.items()}

    old, new = described(before), described(after)
    if before.cluster == after.cluster and before.hardware is not None and after.hardware is not None:
        old |= dict(_fields(to_json(before.hardware), "hardware"))
        new |= dict(_fields(to_json(after.hardware), "hardware"))
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield Change("settings", (name,), old.get(name, ABSENT), new.get(name, ABSENT))


def _fields(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Paths and values of all fields of a record."""
    if not isinstance(value, dict | list):
        yield path, str(value)
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _fields(each, f"{path}.{key}")


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
    return {name: _in_words(graph, each) for name, each in graph.parameters.items()}


def _in_words(graph: GraphPlan, each: ParameterPlan) -> str:
    """Words with DTensor's notation, such as "tp: columns (tp S(0))"."""
    notation = format_placements(each.placements, graph.mesh)
    return f"{words_text(value_words(each.placements, each.dims, graph.mesh))} ({notation})" if each.dims else notation


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
    if found.modules:
        yield "modules, by the change of their time"
        yield from (f"  {change}" for change in found.modules[:MOST_LINES])
    for title, pairs, show in (("time of a step by part", found.parts, format_us), ("memory at the peak by part", found.peak,
                                                                                format_bytes)):
        if pairs:
            yield title
            yield from (f"  {part}: {show(old)} -> {show(new)}" for part, (old, new) in pairs.items())
    if found.costs:
        yield "predicted"
    for name, (old, new) in found.costs.items():
        show = format_us if name.endswith("_us") else format_joules if name.endswith("_j") else format_bytes
        ratio = f" ({new / old - 1:+.1%})" if old and new is not None else ""
        texts = ["unknown" if each is None else show(each) for each in (old, new)]
        yield f"  {name.removesuffix('_us').removesuffix('_j')}: {texts[0]} -> {texts[1]}{ratio}"
    if found.collectives:
        yield "collectives"
    for kind, pair in found.collectives.items():
        texts = [f"{total.count} ({format_bytes(total.bytes)})" for total in pair]
        yield f"  {kind}: {texts[0]} -> {texts[1]}"
