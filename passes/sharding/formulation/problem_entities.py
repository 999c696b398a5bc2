"""Entities of a placement problem: a class of groups (joint strategies), a class of parameters (storage of parameter,
gradient and optimizer state, and the layout in which readers see it), a shared copy of a value with several
readers, a graph input, a graph output.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.cost_model.cost_terms import Prices, price
from passes.errors import BadInput
from passes.graph.layouts import Layout, format_layout, legal, local_bytes, may_stay_sharded, parse_layout
from passes.graph.placement_graph import Value
from passes.hardware.axis import Axes
from passes.op_rules.base import REPLICATE
from passes.sharding.grouping.def_use import DefUse
from passes.sharding.grouping.group_symmetry import value_signature
from passes.sharding.grouping.op_groups import OpGroup
from passes.sharding.oracle.memory_model import HeldBytes, MemoryModel
from passes.sharding.pricing.decision_terms import LocalSizes, update
from passes.sharding.pricing.redistribution import cheapest_route
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.strategies.mesh_strategies import MeshStrategy, Pin, fits
from passes.sharding.strategies.zero_levels import ZeroRules
from passes.solver.problem import Choice, Entity

Port = tuple[int, int]
"""Index of an entity, and index of one of its ports."""


@dataclass(frozen=True)
class EntityChoice:
    """A solver choice and its layouts. group: layouts of the operations, if the entity is a group. gathered: for a parameter
    that the runtime gathers and holds unsharded, the layouts from storage (included) to its output."""

    choice: Choice
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    group: MeshStrategy | None = None
    gathered: tuple[Layout, ...] = ()


def entity_choice(cost: float, held: HeldBytes, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...],
                  group: MeshStrategy | None = None) -> EntityChoice:
    labels = tuple(map(format_layout, inputs)), tuple(map(format_layout, outputs))
    return EntityChoice(Choice(cost, held, *labels), inputs, outputs, group)


@dataclass
class EntityDraft:
    """An entity under construction, while its instances are counted. copied: the value that it is a copy of, if any."""

    name: str
    kind: str
    options: list[EntityChoice]
    multiplicity: int = 0
    copied: Value | None = None

    def finished(self) -> Entity:
        return Entity(self.name, self.kind, self.multiplicity, tuple(o.choice for o in self.options))


def numbered_names(names: Sequence[str]) -> list[str]:
    """The same names, with numbers appended to repeated ones."""
    used: dict[str, int] = {}
    found = []
    for name in names:
        count = used[name] = used.get(name, 0) + 1
        found.append(name if count == 1 else f"{name}#{count}")
    return found


@dataclass
class ProblemEntities:
    """Collects the entities of a problem. drafts: in order of creation; their indices are the problem's. of_group: by the
    group's index. of_input, of_unread: by the value's index."""

    wiring: DefUse
    axes: Axes
    prices: Prices
    lifetimes: MemoryModel
    zero: ZeroRules = ZeroRules()
    drafts: list[EntityDraft] = field(default_factory=list)
    of_group: list[int] = field(default_factory=list)
    of_input: dict[int, int] = field(default_factory=dict)
    of_unread: dict[int, int] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    @property
    def whole(self) -> Layout:
        return (REPLICATE,) * len(self.axes)

    def layouts_supplied(self, port: Port) -> list[Layout]:
        entity, k = port
        return list(dict.fromkeys(o.outputs[k] for o in self.drafts[entity].options))

    def layouts_demanded(self, port: Port) -> list[Layout]:
        entity, k = port
        return list(dict.fromkeys(o.inputs[k] for o in self.drafts[entity].options))

    def _count(self, key: Hashable, make: Callable[[], EntityDraft]) -> int:
        """Index of the entity with this key; adds one to its multiplicity."""
        if key not in self._numbers:
            self._numbers[key] = len(self.drafts)
            self.drafts.append(make())
        number = self._numbers[key]
        self.drafts[number].multiplicity += 1
        return number

    def add_groups(self, names: Sequence[str], classes: Sequence[int], choices: Callable[[OpGroup, int], list[MeshStrategy]],
                   held_inside: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Add an entity per class. choices: from a group and its class index. held_inside: by group, (position of the
        operation, port) of saved values that the group itself accounts for."""
        graph = self.wiring.graph

        def make(group: OpGroup, number: int) -> EntityDraft:
            operations = [graph.operations[i] for i in group.operations]
            made = [(k, port, graph.values[operations[k].outputs[port]]) for k, port in held_inside[group.index]]
            return EntityDraft(names[number], "operations", [
                entity_choice(
                    c.cost,
                    self.lifetimes.saved(sum(
                        local_bytes(value, c.made(k, port), self.axes) for k, port, value in made)),
                    c.inputs, c.outputs, c,
                ) for c in choices(group, number)
            ])

        for group, number in zip(self.wiring.groups, classes, strict=True):
            self.of_group.append(self._count(("group", number), lambda g=group, n=number: make(g, n)))

    def add_inputs(self, state: TrainingStateModel, stored: Mapping[str, Layout], rows: frozenset[str]) -> None:
        """Add entities of graph inputs. stored: input -> its layout, where fixed. rows: inputs sharded by rows on all axes."""
        graph = self.wiring.graph
        for v, tangent in graph.unread.items():
            number = self._add_unread(graph.values[v], tangent)
            if tangent is not None:
                self.of_input[tangent] = number
        for value in graph.values:
            if value.producer is not None or value.index in self.of_input:
                continue
            if value.kind == "parameter":
                self._add_parameter(value, state, stored.get(value.name))
            else:
                by_rows = ((0, 0),) * len(self.axes)
                layout = stored.get(value.name, by_rows if value.name in rows else self.whole)
                gradient = (layout,) * (value.index in self.wiring.gradients)
                self.of_input[value.index] = self._count(
                    ("input", value.index), lambda value=value, layout=layout, gradient=gradient: EntityDraft(
                        value.name, "input", [entity_choice(0.0, self.lifetimes.nothing(), gradient, (layout,))]))

    def _add_parameter(self, value: Value, state: TrainingStateModel, stored: Layout | None) -> None:
        gradient = self.wiring.gradients.get(value.index)
        trained = gradient is not None
        maker = None if gradient is None else self.wiring.maker(gradient)
        made_by = None if maker is None else (self.of_group[maker.index], maker.outputs.index(gradient))
        readers = tuple((self.of_group[group.index], port) for group, port in self.wiring.readers[value.index])
        key: Hashable = ("parameter", readers, made_by, value_signature(value), stored, trained)
        if trained and made_by is None or not readers:
            key = ("parameter", value.index)

        self.of_input[value.index] = self._count(key, lambda: EntityDraft(
            value.name, "parameter", list(self._storage(value, trained, state, stored))))

    def _storage(self, value: Value, trained: bool, state: TrainingStateModel, stored: Layout | None) -> Iterator[EntityChoice]:
        """Choices of a parameter: each storage layout, with the optimizer's time and bytes in memory; and for each the layouts
        in which the runtime may hold it unsharded, gathered once a step if trained, else once for good."""
        layouts = self.zero.storage(value, trained, self.axes) if stored is None else [stored]
        for p in layouts:
            local = local_bytes(value, p, self.axes)
            cost = price(update(value, p, LocalSizes(self.axes)), self.prices) if trained else 0.0
            held = self.lifetimes.parameter(local * (1.0 + state.optimizer * trained), local * state.gradient * trained)
            yield entity_choice(cost, held, (p,) * trained, (p,))
            for q in self.zero.held(p) if trained or stored is not None else ():
                route = cheapest_route(value, p, q, self.axes, self.prices)
                if route is not None and all(hop.collective == "all_gather" for hop in route[1]):
                    us, hops = route
                    besides = self.lifetimes.parameter(local_bytes(value, q, self.axes), 0.0)
                    both = tuple(map(sum, zip(held, besides, strict=True)))
                    yield replace(entity_choice(cost + us * trained, both, (p,) * trained, (q,)),
                                  gathered=(p, *(hop.target for hop in hops)))

    def _add_unread(self, value: Value, tangent: int | None) -> int:
        """Add an output that need not be read: it may stay in the layout of its producer, and gathering it is not charged to
        the step. Its gradient arrives in the same layout."""
        maker = self.wiring.maker(value.index)
        made = [self.whole] if maker is None else self.layouts_supplied(
            (self.of_group[maker.index], maker.outputs.index(value.index)))
        layouts = dict.fromkeys([*(
            tuple(p if may_stay_sharded(value, p, axis) else REPLICATE for p, axis in zip(layout, self.axes))
            for layout in made), self.whole])
        self.of_unread[value.index] = self._count(("unread", value.index),
                                                  lambda: EntityDraft(f"output:{value.name}", "output", [
            entity_choice(0.0, self.lifetimes.nothing(), (p,), (p,) * (tangent is not None)) for p in layouts]))
        return self.of_unread[value.index]

    def add_output(self, position: int, value: Value) -> int:
        """Add a graph output: replicated if it is read."""
        if value.index in self.of_unread:
            return self.of_unread[value.index]
        return self._count(("output", position), lambda: EntityDraft(
            f"output:{value.name}", "output", [entity_choice(0.0, self.lifetimes.nothing(), (self.whole,), ())]))

    def add_copy(self, role: str, source: Port, readers: Sequence[Port], value: Value, held: bool, weight: bool = False) -> int:
        """Add a shared copy: one layout for all readers, among those that an end supplies or demands. weight: it is a copy of
        a parameter, saved for backward."""

        def make() -> EntityDraft:
            demanded = (layout for reader in readers for layout in self.layouts_demanded(reader))
            layouts = dict.fromkeys([*self.layouts_supplied(source), *demanded, self.whole])
            layouts = self.zero.kept(layouts, self.axes) if weight else layouts
            return EntityDraft(f"{role}:{value.name}", role, [
                entity_choice(0.0, self.lifetimes.saved(local_bytes(value, p, self.axes) if held else 0.0), (p,), (p,))
                for p in layouts], copied=value)

        return self._count((role, source, tuple(readers), value_signature(value), held), make)

    def name_apart(self) -> None:
        """Append numbers to equal names of entities."""
        for draft, name in zip(self.drafts, numbered_names([draft.name for draft in self.drafts])):
            draft.name = name

    def pin(self, pinned: Mapping[str, Pin]) -> None:
        """Keep only the choices that a plan names, by entity. A label may be left open (`FREE`)."""
        for draft in self.drafts:
            if draft.name not in pinned:
                continue
            inputs, outputs = pinned[draft.name]
            kept = [o for o in draft.options if fits((inputs, outputs), o.choice.inputs, o.choice.outputs)]
            label = inputs[0] if inputs == outputs and len(inputs) == 1 else None
            if not kept and draft.copied is not None and label is not None and legal(
                    draft.copied, parse_layout(label), self.axes):
                # Its ends are pinned, so that they offer fewer layouts than when the plan was made: any of these is on the way.
                continue
            if not kept:
                raise BadInput(
                    f"the plan wants {draft.name} to read {list(inputs)} and make {list(outputs)}, which it cannot",
                    where=draft.name, next_step="plan this model again, or take the entry out of the plan's decisions",
                )
            draft.options = kept
