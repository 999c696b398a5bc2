"""The placement problem as numbers: entities choose, edges pay for turning supplied labels into demanded ones.

Nothing here knows about tensors, meshes or torch. An *entity* (a group of operations, a stored parameter, a saved value)
takes exactly one of its *choices*. A choice supplies a label on each out-port and demands one on each in-port; a
*label* stands for the placement of a value on all mesh axes. An *edge* leads from an out-port to an in-port and has
*arcs*, each one collective on one axis, that turn one label into another. Then

    cost       = sum over entities of multiplicity * cost  +  sum over edges of multiplicity * cheapest path's cost
    held_bytes = sum over entities of multiplicity * held_bytes  <=  budget_bytes, at every position

A *position* is a point of the step, such as the end of forward, at which memory is counted: bytes are a number for each.

An edge is free where nothing is demanded (None). It cannot be met where something is demanded and nothing
supplied, or where no path of arcs leads from the one label to the other.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from passes.errors import BadInput

Label = str  # placement of a value on all mesh axes, opaque here


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy of an entity.

    cost: of one instance, >= 0, in the unit of the prices: µs, or µJ where energy is minimized. held_bytes: bytes that one
    instance holds on every device at each position, >= 0. inputs: label demanded on each in-port (None: takes nothing).
    outputs: label supplied on each out-port (None: supplies nothing).
    """

    cost: float
    held_bytes: tuple[float, ...]
    inputs: tuple[Label | None, ...]
    outputs: tuple[Label | None, ...]


@dataclass(frozen=True, slots=True)
class Entity:
    """A decision variable; it stands for `multiplicity` equal instances, which all choose alike."""

    name: str
    kind: str
    multiplicity: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Arc:
    """One collective on one axis: turns `source` into `target` for `cost` >= 0."""

    source: Label
    target: Label
    cost: float


@dataclass(frozen=True, slots=True)
class Edge:
    """A value between an out-port and an in-port; `source` and `target` are indices into `Problem.entities`.

    It stands for `multiplicity` equal values. Source and target may be the same entity: one layer feeding the next one
    of its class. Edges that share one `arcs` tuple (the same object) are cheaper to prepare.
    """

    source: int
    source_port: int
    target: int
    target_port: int
    multiplicity: int
    arcs: tuple[Arc, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Entities, edges and the bytes that each device may hold (None: no limit). Raises `BadInput` if malformed.

    positions: names of the points of the step at which bytes are counted, with one budget. "step": throughout.
    """

    entities: tuple[Entity, ...]
    edges: tuple[Edge, ...]
    budget_bytes: float | None = None
    positions: tuple[str, ...] = ("step",)

    def __post_init__(self) -> None:
        for index, entity in enumerate(self.entities):
            _check_entity(entity, f"entity {index} {entity.name!r}", self.positions)
        checked_arcs: set[int] = set()  # by identity: arcs are shared between edges
        for index, edge in enumerate(self.edges):
            _check_edge(edge, self.entities, f"edge {index} {edge.name!r}")
            if id(edge.arcs) not in checked_arcs:
                checked_arcs.add(id(edge.arcs))
                for arc in edge.arcs:
                    _check_amount(arc.cost, f"cost of arc {arc.source} -> {arc.target}",
                                  f"edge {index} {edge.name!r}")
        if self.budget_bytes is not None:
            _check_amount(self.budget_bytes, "budget_bytes", "problem")

    def supplied(self, edge: Edge, choice: int) -> Label | None:
        """The label on the edge's out-port when its source takes its choice number `choice`."""
        return self.entities[edge.source].choices[choice].outputs[edge.source_port]

    def demanded(self, edge: Edge, choice: int) -> Label | None:
        """The label on the edge's in-port when its target takes its choice number `choice`."""
        return self.entities[edge.target].choices[choice].inputs[edge.target_port]

    def held_bytes(self, chosen: Sequence[int]) -> tuple[float, ...]:
        """Bytes on each device, at each position, when entity i takes its choice number chosen[i]."""
        pairs = [(e.multiplicity, e.choices[c].held_bytes) for e, c in zip(self.entities, chosen, strict=True)]
        return tuple(math.fsum(count * held[k] for count, held in pairs) for k in range(len(self.positions)))


@dataclass(frozen=True, slots=True)
class Solution:
    """Result of a solver.

    status: "optimal" (proven within the requested gap), "feasible" (time ran out first), "infeasible" (no
    assignment exists) or "no_solution" (none found in time, or the bound lies above the cutoff); with the last two,
    `chosen` and `paths` are empty and `cost` is infinite.
    chosen: choice index per entity. paths: per edge, the arcs taken in order, empty where nothing has to change.
    bound: no assignment costs less. gap: (cost - bound) / cost, 0 if the optimum is proven.
    held_bytes: on each device, at each position. variables, binaries, constraints: size of the model that the solver saw.
    seconds: from problem to checked solution. integral_relaxation: the LP relaxation alone gave the answer.
    """

    status: Literal["optimal", "feasible", "infeasible", "no_solution"]
    chosen: tuple[int, ...]
    paths: tuple[tuple[Arc, ...], ...]
    cost: float
    bound: float
    gap: float
    held_bytes: tuple[float, ...]
    variables: int
    binaries: int
    constraints: int
    seconds: float
    solver: str
    integral_relaxation: bool


def _check_entity(entity: Entity, where: str, positions: tuple[str, ...]) -> None:
    if not entity.choices:
        raise BadInput("an entity has no choices", where, "give it at least one; a replicated one always exists")
    if entity.multiplicity < 0:
        raise BadInput(f"multiplicity is {entity.multiplicity}", where, "count its instances: 0 or more")
    ports = len(entity.choices[0].inputs), len(entity.choices[0].outputs)
    for index, choice in enumerate(entity.choices):
        _check_amount(choice.cost, f"cost of choice {index}", where)
        if len(choice.held_bytes) != len(positions):
            raise BadInput(
                f"choice {index} holds bytes at {len(choice.held_bytes)} positions, the problem has {len(positions)}",
                where,
                f"give every choice a number for each of {list(positions)}",
            )
        for held in choice.held_bytes:
            _check_amount(held, f"held_bytes of choice {index}", where)
        if (len(choice.inputs), len(choice.outputs)) != ports:
            raise BadInput(
                f"choice {index} has {len(choice.inputs)} in-ports and {len(choice.outputs)} out-ports, "
                f"choice 0 has {ports[0]} and {ports[1]}",
                where,
                "give every choice one label (or None) per port",
            )


def _check_edge(edge: Edge, entities: tuple[Entity, ...], where: str) -> None:
    if edge.multiplicity < 0:
        raise BadInput(f"multiplicity is {edge.multiplicity}", where, "count its instances: 0 or more")
    for end, entity in (("source", edge.source), ("target", edge.target)):
        if not 0 <= entity < len(entities):
            raise BadInput(f"{end} is entity {entity}, but there are {len(entities)} entities", where,
                           "use an index into Problem.entities")
    for kind, entity, port, ports in (
        ("out", edge.source, edge.source_port, entities[edge.source].choices[0].outputs),
        ("in", edge.target, edge.target_port, entities[edge.target].choices[0].inputs),
    ):
        if not 0 <= port < len(ports):
            raise BadInput(f"{kind}-port {port} does not exist: entity {entities[entity].name!r} has {len(ports)}",
                           where, f"use an index into the choices' {kind}puts")


def _check_amount(value: float, name: str, where: str) -> None:
    if not 0 <= value < math.inf:  # False for nan, too
        raise BadInput(f"{name} is {value}", where, "give a finite number, 0 or more")
