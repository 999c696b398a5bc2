"""From a placement graph to the numbers that the ILP solves, and back from its solution to a decision.

Entities: a class of clusters (its joint strategies), a class of parameters (where it is stored, with gradient and
optimizer state), a shared copy of a value with several readers (one for forward readers, which is also what is saved
for backward, one for backward readers), a graph input, a returned value. Edges: a value on its way between two of them.
"""
from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from passes.errors import BadInput
from passes.graph.decision import Decision, Hop, Route, Way
from passes.graph.layouts import Layout, format_layout, legal, local_bytes, parse_layout
from passes.graph.placement_graph import PlacementGraph, Value
from passes.partition.choices import AxisRule, ClusterChoice, Prices, cluster_choices, slices
from passes.partition.folding import classes_of, cluster_signature, value_signature
from passes.partition.groups import Cluster, cluster
from passes.partition.redistribution import bucket_bytes_of, changes_between
from passes.partition.saved import saved_values
from passes.rules.base import PARTIAL, PARTIAL_MAX, REPLICATE
from passes.solve.problem import Arc, Choice, Edge, Entity, Problem, Solution

Pin = tuple[tuple[str | None, ...], tuple[str | None, ...]]
"""Labels that a choice reads and makes."""


@dataclass(frozen=True)
class StateModel:
    """Bytes per byte of a trainable parameter that gradient and optimizer state take (AdamW: 1 and 2)."""

    gradient: float = 1.0
    optimizer: float = 2.0


@dataclass
class _Class:
    name: str
    kind: str
    choices: list[Choice]
    layouts: list[tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]]]
    multiplicity: int = 0
    kept: list[int] | None = None
    """Numbers that the choices had before a plan pinned them."""

    def original(self, choice: int) -> int:
        return choice if self.kept is None else self.kept[choice]


@dataclass
class _Chain:
    """Edges from where a value is made to one reader, with the phase in which each runs."""

    edges: list[tuple[int, bool]] = field(default_factory=list)


class PlacementProblem:
    """Builds `problem` on construction; `decode(solution)` gives the decision.

    `pinned`: entity name -> (input labels, output labels) that its choice must have, as a saved plan states them;
    `stored`: parameter name -> layout that it has already; `rows`: graph inputs handed in split by rows on all axes;
    `memo`: choices by cluster signature, to share between problems of one mesh; `bucket_bytes`: of gradients that are
    reduced together (None: as the graph says).
    """

    def __init__(
        self,
        graph: PlacementGraph,
        sizes: tuple[int, ...],
        prices: Prices,
        axis_rules: Sequence[AxisRule],
        *,
        state: StateModel | None = None,
        budget_bytes: float | None = None,
        stored: Mapping[str, Layout] | None = None,
        rows: frozenset[str] = frozenset(),
        pinned: Mapping[str, Pin] | None = None,
        memo: dict[Hashable, list[ClusterChoice]] | None = None,
        fold: bool = True,
        merge: bool = True,
        bucket_bytes: float | None = None,
    ):
        self.graph, self.sizes, self.prices = graph, sizes, prices
        self.state = state or StateModel()
        self.stored, self.rows = stored or {}, rows
        self.bucket_bytes = bucket_bytes_of(graph) if bucket_bytes is None else bucket_bytes
        self.whole: Layout = (REPLICATE,) * len(sizes)
        self.memo = {} if memo is None else memo
        self.clusters: list[Cluster] = self._clusters(merge, axis_rules)
        self._owner = {i: c.index for c in self.clusters for i in c.operations}
        self.saved = saved_values(graph) | {v.index for v in graph.values if v.producer is None and v.name in self.rows}
        self.held_inside = [self._held_inside(c) for c in self.clusters]
        marks = [(held, self._allowed(c, axis_rules)) for c, held in zip(self.clusters, self.held_inside)]
        self.cluster_class, names = classes_of(self.clusters, graph, fold, marks)
        self.classes: list[_Class] = []
        self.edges: dict[Hashable, int] = {}
        self.edge_rows: list[list] = []
        self._arcs: dict[Hashable, tuple[Arc, ...]] = {}
        self._keys: dict[Hashable, int] = {}
        self.choices: list[list[ClusterChoice]] = []
        self.reads: dict[tuple[int, int], _Chain] = {}
        self.output_chains: list[_Chain] = []
        self.value_source: dict[int, tuple[int, int]] = {}
        self.input_entity: dict[int, int] = {}
        self._cluster_entities(names, axis_rules, fold)
        self._input_entities()
        self._connect()
        self._name_apart()
        if pinned:
            self._pin(pinned)
        self.problem = Problem(
            tuple(Entity(c.name, c.kind, c.multiplicity, tuple(c.choices)) for c in self.classes),
            tuple(Edge(a, i, b, j, n, arcs, name) for a, i, b, j, n, arcs, name in self.edge_rows),
            budget_bytes,
        )

    # --- entities -------------------------------------------------------------------------------------------------

    def _clusters(self, merge: bool, axis_rules: Sequence[AxisRule]) -> list[Cluster]:
        """A cluster whose operations a pinned axis splits in ways that do not go together is taken apart: no choice is
        left of it, or none but those that read partial sums, which nothing might make."""

        def stuck(c: Cluster) -> bool:
            return len(c.operations) > 1 and all(
                any(p in (PARTIAL, PARTIAL_MAX) for layout in choice.inputs for p in layout)
                for choice in self._choices_of(c, axis_rules)
            )

        clusters = cluster(self.graph, merge)
        apart = {i for c in clusters if stuck(c) for i in c.operations}
        return cluster(self.graph, merge, apart) if apart else clusters

    def _choices_of(self, c: Cluster, axis_rules: Sequence[AxisRule]) -> list[ClusterChoice]:
        key = (cluster_signature(c, self.graph), self._allowed(c, axis_rules))
        if key not in self.memo:
            self.memo[key] = cluster_choices(c, self.graph, self.sizes, self.prices, axis_rules)
        return self.memo[key]

    def _allowed(self, c: Cluster, axis_rules: Sequence[AxisRule]) -> tuple[bool, ...]:
        """What the axes allow of its operations. Equal clusters may differ in that: one reads a weight, the other does not."""
        operations = [self.graph.operations[i] for i in c.operations]
        return tuple(rule(op, s) for rule in axis_rules for op in operations for s in op.strategies)

    def _cluster_entities(self, names: list[str], axis_rules: Sequence[AxisRule], fold: bool) -> None:
        for c, number in zip(self.clusters, self.cluster_class):
            if number == len(self.classes):
                found = self._choices_of(c, axis_rules)
                entity = _Class(names[number], "operations", [], [])
                for choice in found:
                    held = sum(
                        local_bytes(self._made(c, k, port), choice.operations[k].outputs[port], self.sizes)
                        for k, port in self.held_inside[c.index]
                    )
                    entity.choices.append(Choice(
                        choice.cost_us, held, tuple(map(format_layout, choice.inputs)),
                        tuple(map(format_layout, choice.outputs)),
                    ))
                    entity.layouts.append((choice.inputs, choice.outputs))
                self.choices.append(found)
                self.classes.append(entity)
            self.classes[number].multiplicity += 1

    def _made(self, c: Cluster, position: int, port: int) -> Value:
        return self.graph.values[self.graph.operations[c.operations[position]].outputs[port]]

    def _held_inside(self, c: Cluster) -> tuple[tuple[int, int], ...]:
        """(position of the operation, port) of the saved values that have no shared copy, which would carry their bytes."""
        return tuple(
            (k, port) for k, i in enumerate(c.operations) for port, v in enumerate(self.graph.operations[i].outputs)
            if v in self.saved and not (v in c.outputs and self._has_backward_reader(v))
        )

    def _has_backward_reader(self, v: int) -> bool:
        value = self.graph.values[v]
        if value.producer is None:
            return False
        own = self._cluster_of(value.producer)
        readers = {self._cluster_of(u) for u in value.users} - {own}
        return not self.clusters[own].backward and any(self.clusters[c].backward for c in readers)

    def _cluster_of(self, operation: int | None) -> int:
        assert operation is not None, "a graph input is in no cluster"
        return self._owner[operation]

    def _entity(self, key: Hashable, make) -> int:
        if key not in self._keys:
            self._keys[key] = len(self.classes)
            self.classes.append(make())
        number = self._keys[key]
        self.classes[number].multiplicity += 1
        return number

    def _port_entity(self, name: str, kind: str, rows: list[tuple[Layout, float, float]], inputs: int, outputs: int):
        """An entity whose ports all have one layout: (layout, cost, held bytes) per choice."""
        return _Class(
            name, kind,
            [Choice(cost, held, (format_layout(p),) * inputs, (format_layout(p),) * outputs) for p, cost, held in rows],
            [((p,) * inputs, (p,) * outputs) for p, _, _ in rows],
        )

    def _input_entities(self) -> None:
        self.consumers: dict[int, list[tuple[int, int]]] = {v.index: [] for v in self.graph.values}
        for c in self.clusters:
            for port, v in enumerate(c.inputs):
                self.consumers[v].append((c.index, port))
        self.gradient_of: dict[int, int] = {p: v for v, p in self.graph.outputs if p is not None}
        for value in self.graph.values:
            if value.producer is not None:
                continue
            readers = tuple((self.cluster_class[c], port) for c, port in self.consumers[value.index])
            if value.kind == "parameter":
                gradient = self.gradient_of.get(value.index)
                made_by = None
                if gradient is not None and self.graph.values[gradient].producer is not None:
                    owner = self._cluster_of(self.graph.values[gradient].producer)
                    made_by = (self.cluster_class[owner], self.clusters[owner].outputs.index(gradient))
                stored = self.stored.get(value.name)
                key = ("parameter", readers, made_by, value_signature(value), stored, gradient is not None)
                if made_by is None and gradient is not None or not readers:
                    key = ("parameter", value.index)
                self.input_entity[value.index] = self._entity(
                    key, lambda value=value, gradient=gradient, stored=stored: self._port_entity(
                        value.name, "parameter", self._storage(value, gradient is not None, stored),
                        1 if gradient is not None else 0, 1))
            else:
                layout = ((0, 0),) * len(self.sizes) if value.name in self.rows else self.whole
                self.input_entity[value.index] = self._entity(
                    ("input", value.index),
                    lambda value=value, layout=layout: self._port_entity(
                        value.name, "input", [(layout, 0.0, 0.0)], 0, 1),
                )

    def _storage(self, value: Value, trained: bool, stored: Layout | None) -> list[tuple[Layout, float, float]]:
        if stored is not None:
            layouts = [stored]
        else:
            dims = [(d, 0) for d in range(len(value.spec.shape)) if value.factors[d]]
            per_axis = [[REPLICATE, *dims]] * len(self.sizes)
            layouts = [p for p in itertools.product(*per_axis) if legal(value, p, self.sizes)]
        held = 1.0 + (self.state.gradient + self.state.optimizer if trained else 0.0)
        rows = []
        for p in layouts:
            local = local_bytes(value, p, self.sizes)
            cost = self.prices.optimizer_us(local / value.spec.itemsize, value.spec.dtype) if trained else 0.0
            rows.append((p, cost, local * held))
        return rows

    def _name_apart(self) -> None:
        used: dict[str, int] = {}
        for c in self.classes:
            count = used[c.name] = used.get(c.name, 0) + 1
            c.name = c.name if count == 1 else f"{c.name}#{count}"

    def _pin(self, pinned: Mapping[str, Pin]) -> None:
        """Keep only the choices that a plan names."""
        for c in self.classes:
            if c.name not in pinned or len(c.choices) == 1:
                continue
            kept = [k for k, x in enumerate(c.choices) if (x.inputs, x.outputs) == pinned[c.name]]
            if not kept:
                inputs, outputs = pinned[c.name]
                raise BadInput(
                    f"the plan wants {c.name} to read {list(inputs)} and make {list(outputs)}, which it cannot",
                    where=c.name, next_step="plan this model again, or take the entry out of the plan's decisions",
                )
            c.choices = [c.choices[k] for k in kept]
            c.layouts = [c.layouts[k] for k in kept]
            c.kept = kept

    # --- edges ----------------------------------------------------------------------------------------------------

    def _layouts(self, entity: int, port: int, side: int) -> list[Layout]:
        found = (row[side][port] for row in self.classes[entity].layouts)
        return list(dict.fromkeys(layout for layout in found if layout is not None))

    def _edge(self, source: tuple[int, int], target: tuple[int, int], value: Value) -> int:
        key = (source, target, value_signature(value))
        if key not in self.edges:
            ends = dict.fromkeys(self._layouts(*source, 1) + self._layouts(*target, 0))
            bucket_bytes = self.bucket_bytes if self.classes[target[0]].kind == "parameter" else 0.0
            arcs_key = (value.spec, value.factors, tuple(sorted(map(format_layout, ends))), bucket_bytes)
            if arcs_key not in self._arcs:
                self._arcs[arcs_key] = tuple(
                    Arc(format_layout(s.source), format_layout(s.target), s.cost_us)
                    for s in changes_between(value, ends, self.sizes, self.prices, bucket_bytes))
            self.edges[key] = len(self.edge_rows)
            self.edge_rows.append([*source, *target, 0, self._arcs[arcs_key], value.name])
        number = self.edges[key]
        self.edge_rows[number][4] += 1
        return number

    def _hub(self, role: str, source: tuple[int, int], readers: list[tuple[int, int]], value: Value, held: bool) -> int:
        """A shared copy: one layout for all readers, among those that an end supplies or demands."""

        def make() -> _Class:
            layouts = self._layouts(*source, 1)
            for entity, port in readers:
                layouts += self._layouts(entity, port, 0)
            layouts = list(dict.fromkeys([*layouts, self.whole]))
            rows = [(p, 0.0, local_bytes(value, p, self.sizes) if held else 0.0) for p in layouts]
            return self._port_entity(f"{role}:{value.name}", role, rows, 1, 1)

        return self._entity((role, source, tuple(readers), value_signature(value), held), make)

    def _connect(self) -> None:
        outputs_of: dict[int, list[int]] = {}
        for k, (v, _) in enumerate(self.graph.outputs):
            outputs_of.setdefault(v, []).append(k)
        chains: dict[int, _Chain] = {}
        for value in self.graph.values:
            v = value.index
            if value.producer is None:
                source = (self.input_entity[v], 0)
                made_backward = value.kind == "tangent"
            else:
                owner = self.clusters[self._cluster_of(value.producer)]
                if v not in owner.outputs:
                    continue
                source = (self.cluster_class[owner.index], owner.outputs.index(v))
                made_backward = owner.backward
            self.value_source[v] = source
            ends: list[tuple[tuple[int, int], bool, tuple]] = []
            for c, port in self.consumers[v]:
                ends.append(((self.cluster_class[c], port), self.clusters[c].backward, ("read", c, v)))
            for k in outputs_of.get(v, ()):
                parameter = self.graph.outputs[k][1]
                if parameter is not None:
                    target = (self.input_entity[parameter], 0)
                else:
                    target = (self._entity(("output", k), lambda value=value: self._port_entity(
                        f"output:{value.name}", "output", [(self.whole, 0.0, 0.0)], 1, 0)), 0)
                # A value that forward makes is returned by forward.
                ends.append((target, made_backward, ("output", k)))
            self._fan_out(value, source, made_backward, ends, chains)
        self.output_chains = [chains[-1 - k] for k in range(len(self.graph.outputs))]

    def _fan_out(self, value: Value, source, made_backward: bool, ends, chains) -> None:
        forward = [e for e in ends if not e[1]]
        backward = [e for e in ends if e[1]]
        prefix: list[tuple[int, bool]] = []
        # What forward computes and backward reads is saved once, in the layout of the forward copy; so is what forward
        # gathers of a batch that came in rows. Parameters and whole inputs are there anyway.
        computed = value.producer is not None or value.name in self.rows
        kept = computed and not made_backward and bool(backward)
        if kept or len(forward) > 1:
            hub = self._hub("kept" if kept else "shared", source, [e[0] for e in forward] or [e[0] for e in backward],
                            value, kept and value.index in self.saved)
            copy = [(self._edge(source, (hub, 0), value), made_backward)]
            self._ends(value, (hub, 0), copy, forward, False, chains)
            if kept:
                source, prefix = (hub, 0), copy
        else:
            self._ends(value, source, prefix, forward, False, chains)
        if len(backward) > 1:
            hub = self._hub("shared", source, [e[0] for e in backward], value, False)
            prefix = [*prefix, (self._edge(source, (hub, 0), value), True)]
            source = (hub, 0)
        self._ends(value, source, prefix, backward, True, chains)

    def _ends(self, value: Value, source, prefix, ends, backward: bool, chains) -> None:
        for target, _, what in ends:
            chain = _Chain([*prefix, (self._edge(source, target, value), backward)])
            if what[0] == "read":
                self.reads[what[1], what[2]] = chain
            else:
                chains[-1 - what[1]] = chain

    # --- back -----------------------------------------------------------------------------------------------------

    def pins(self, solution: Solution) -> dict[str, Pin]:
        """What was chosen, by entity: enough to choose the same again."""
        return {
            c.name: (c.choices[k].inputs, c.choices[k].outputs) for c, k in zip(self.classes, solution.chosen)
            if c.kind != "output"
        }

    def decode(self, solution: Solution) -> Decision:
        """Layouts of every operation of the unfolded graph, and the route of every operand and output."""
        decision = Decision(self.sizes)
        source_layout: dict[int, Layout] = {}
        for v, (entity, port) in self.value_source.items():
            source_layout[v] = self._supplied(entity, port, solution)
        for v, entity in self.input_entity.items():
            decision.inputs[v] = self._supplied(entity, 0, solution)
        for c in self.clusters:
            number = self.cluster_class[c.index]
            choice = self.choices[number][self.classes[number].original(solution.chosen[number])]
            arrived = {v: self._route(v, source_layout[v], self.reads[c.index, v], solution) for v in c.inputs}
            inside: dict[int, Layout] = {}
            for index, row in zip(c.operations, choice.operations):
                op = self.graph.operations[index]
                decision.operations[index] = row
                for position, (v, wanted) in enumerate(zip(op.inputs, row.inputs)):
                    route = arrived[v] if v in arrived else Route(v, inside[v])
                    rest = slices(self.graph.values[v], route.target, wanted, self.sizes, self.prices)
                    assert rest is not None, (op.name, route.target, wanted)
                    hops = route.hops + tuple(Hop(layout, op.backward) for layout in rest)
                    decision.routes[index, position] = Route(v, route.source, hops)
                inside.update(zip(op.outputs, row.outputs))
        decision.outputs = [
            self._route(v, source_layout[v], chain, solution)
            for (v, _), chain in zip(self.graph.outputs, self.output_chains)
        ]
        return decision

    def _supplied(self, entity: int, port: int, solution: Solution) -> Layout:
        layout = self.classes[entity].layouts[solution.chosen[entity]][1][port]
        assert layout is not None, "every port of these entities has a layout"
        return layout

    def paid_ways(self, decision: Decision, solution: Solution) -> list[Way]:
        """Every way that is paid for by itself."""
        ways: dict[tuple, Way] = {}
        chains = [(v, chain) for (_, v), chain in self.reads.items()]
        chains += [(v, chain) for (v, _), chain in zip(self.graph.outputs, self.output_chains)]
        for number, (v, chain) in enumerate(chains):
            entity, port = self.value_source[v]
            route = self._route(v, self._supplied(entity, port, solution), chain, solution)
            done = 0
            for k, (edge, _) in enumerate(chain.edges):
                after = done + len(solution.paths[edge])
                # The last edge of a chain is the reader's own; those before lead to copies that readers share.
                key = (number,) if k == len(chain.edges) - 1 else (v, tuple(e for e, _ in chain.edges[: k + 1]))
                end = self.classes[self.edge_rows[edge][2]].kind
                ways.setdefault(key, Way(
                    Route(v, route.source, route.hops[:after]), done, after, end == "kept", end == "parameter"))
                done = after
        return list(ways.values())

    def _route(self, v: int, source: Layout, chain: _Chain, solution: Solution) -> Route:
        hops = [
            Hop(parse_layout(arc.target), backward) for edge, backward in chain.edges for arc in solution.paths[edge]
        ]
        return Route(v, source, tuple(hops))
