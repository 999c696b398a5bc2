"""The placement problem as an integer linear program, written with PuLP.

Variables (only for choices that the reduction leaves open; see `reduction`)
    x[e,c] in {0,1}   entity e takes choice c
    f[d,a] in [0,1]   how much of the value on edge d takes arc a, that is one collective on one axis
    decided = 1       carries the cost of everything that is already decided

Objective
    minimize  sum_e,c cost[e,c] x[e,c]  +  sum_d,a multiplicity[d] cost[a] f[d,a]  +  decided cost
    in a unit of 2^k us in which the optimum is near 1e5 (if no assignment is known yet: the median coefficient near 1),
    because costs span nine orders of magnitude and solvers work with absolute tolerances of 1e-6

Constraints, each family added by the function of the same name; rows and columns of an LP dump start with these names
    (1) one_choice[e]   sum_c x[e,c] = 1
    (2) flow[d,label]   sum of x that supply it + sum of f into it - sum of f out of it - sum of x that demand it = 0;
                        >= 0 where some choice demands nothing: then the supplied label may be dropped
    (3) budget[p]       sum_e,c bytes[e,c,p] x[e,c] <= budget - bytes of decided entities, in a power of 1024 B below it,
                        at each position p of the step
    (4) cover[k]        sum_e x[e,c_k(e)] <= n - 1: not all n of these choices together. Added when a solution passes
                        (3) within the solver's tolerance but, counted exactly, exceeds the budget at some position

An edge needs one f per arc instead of one variable per pair of labels: on a mesh of two axes less than half as many,
for the same bound. With x integral the cheapest flow is a cheapest path, so f need not be integer.
"""
from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp

from passes.solver.problem import Arc
from passes.solver.reduction import Reduced

_INTEGRAL = 1e-6  # how far from 0 and 1 an x may lie and still count as integral
_OBJECTIVE = 1e5  # where the optimum should lie, in units of the objective
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class _FixedVariablesProgram(pulp.LpProblem):
    """A program with a fixed list of variables: PuLP's own collects them from each added row, and from all on each access."""

    written: Any = None
    """Coefficients of the rows as they were passed to HiGHS, which a second run passes again unless rows were added."""

    def fix(self, variables: Iterable[pulp.LpVariable]) -> None:
        self._variables = sorted(variables, key=operator.attrgetter("name"))  # PuLP's writer of MPS files reads that

    def variables(self) -> list[pulp.LpVariable]:
        return self._variables

    def addVariables(self, variables: Iterable[pulp.LpVariable]) -> None:
        """Do nothing: all variables are known."""

    _add_variables = addVariables


@dataclass
class PlacementILP:
    """The program of a reduced problem.

    choices: x per entity and candidate, empty for decided entities. arcs: each open edge's arcs with their f.
    unit: cost per unit of the program's objective. covers: rows that `cover` has added.
    """

    reduced: Reduced
    program: pulp.LpProblem
    decided: pulp.LpVariable
    unit: float = 1.0
    choices: list[list[pulp.LpVariable]] = field(default_factory=list)
    arcs: dict[int, list[tuple[Arc, pulp.LpVariable]]] = field(default_factory=dict)
    covers: int = 0

    @property
    def variables(self) -> int:
        return self.binaries + sum(len(arcs) for arcs in self.arcs.values()) + 1

    @property
    def binaries(self) -> int:
        return sum(len(choices) for choices in self.choices)

    @property
    def constraints(self) -> int:
        return self.program.numConstraints()

    def cost(self) -> float:
        """The objective at the variables' values."""
        terms = (self.program.objective or {}).items()
        return self.unit * math.fsum(cost * _value(variable) for variable, cost in terms)

    def set_integer(self, integer: bool) -> None:
        """Make x integer, or continuous for the relaxation."""
        for choices in self.choices:
            for variable in choices:
                variable.cat = pulp.LpInteger if integer else pulp.LpContinuous

    def picked(self) -> list[int]:
        """The position of the candidate with the largest x, for each entity."""
        return [int(np.argmax([_value(x) for x in choices])) if choices else 0 for choices in self.choices]

    def fractional(self) -> int:
        """Number of x that are neither 0 nor 1."""
        values = np.array([_value(x) for choices in self.choices for x in choices])
        return int((np.minimum(values, 1 - values) > _INTEGRAL).sum())

    def set_values(self, picked: Sequence[int]) -> None:
        """Set all variables to an assignment: x as picked, f along the cheapest paths."""
        reduced = self.reduced
        for choices, position in zip(self.choices, picked, strict=True):
            for number, x in enumerate(choices):
                x.varValue = float(number == position)
        chosen = reduced.original(list(picked))
        for index, arcs in self.arcs.items():
            edge = reduced.problem.edges[index]
            taken = set(reduced.paths[index].path(reduced.problem.supplied(edge, chosen[edge.source]),
                                                  reduced.problem.demanded(edge, chosen[edge.target])))
            for arc, f in arcs:
                f.varValue = float(arc in taken)
        self.decided.varValue = 1.0


def coefficients(reduced: Reduced) -> int:
    """Approximate number of coefficients of the program of `reduced`."""
    return 2 * sum(len(left) * (1 + len(edges)) for left, edges in zip(reduced.candidates, reduced.open_at) if len(left) > 1)


def build(reduced: Reduced, expected: float | None = None) -> PlacementILP:
    """The program of `reduced`, which has undecided entities. expected: approximate optimum."""
    program = _FixedVariablesProgram("placement", pulp.LpMinimize)
    decided = _variable(program, "decided")
    decided.lowBound = decided.upBound = 1.0
    model = PlacementILP(reduced, program, decided)
    _add_variables(model)
    named = [decided, *(x for choices in model.choices for x in choices), *(f for arcs in model.arcs.values() for _, f in arcs)]
    program.fix(named)
    _set_objective(model, expected)
    one_choice(model)
    flow(model)
    budget(model)
    return model


def one_choice(model: PlacementILP) -> None:
    """(1) Every entity takes exactly one choice."""
    for entity, choices in enumerate(model.choices):
        if choices:
            name = f"one_choice_{entity}_{_word(model.reduced.problem.entities[entity].name)}"
            _add_row(model, dict.fromkeys(choices, 1.0), pulp.LpConstraintEQ, 1.0, name)


def flow(model: PlacementILP) -> None:
    """(2) On every open edge, supplied labels turn along arcs into demanded ones."""
    reduced = model.reduced
    for index, arcs in model.arcs.items():
        edge, labels = reduced.problem.edges[index], reduced.paths[index].index
        rows: dict[int, dict[pulp.LpVariable, float]] = {}
        for x, label in zip(model.choices[edge.source], reduced.supply[index].tolist(), strict=True):
            rows.setdefault(label, {})[x] = 1.0
        for x, label in zip(model.choices[edge.target], reduced.demand[index].tolist(), strict=True):
            rows.setdefault(label, {})[x] = -1.0
        for arc, f in arcs:
            rows.setdefault(labels[arc.source], {})[f] = -1.0
            rows.setdefault(labels[arc.target], {})[f] = 1.0
        nothing = labels[None]
        may_drop = bool((reduced.demand[index] == nothing).any())
        rows.pop(nothing, None)
        named = {number: label for label, number in labels.items() if label is not None}
        for label, terms in rows.items():
            name = f"flow_{index}_{_word(edge.name)}_{label}_{_word(named[label])}"
            _add_row(model, terms, pulp.LpConstraintGE if may_drop else pulp.LpConstraintEQ, 0.0, name)


def budget(model: PlacementILP) -> None:
    """(3) Bytes held on each device stay within the budget, at every position."""
    reduced = model.reduced
    limit = reduced.problem.budget_bytes
    if limit is None:
        return
    power = min(max(int(math.log(max(limit, 1.0), 1024)), 0), len(_BYTE_UNITS) - 1)
    unit = 1024.0**power
    for position, word in enumerate(reduced.problem.positions):
        decided = math.fsum(float(held[0, position]) for held in reduced.held_bytes if len(held) == 1)
        terms = {x: float(held) / unit
                 for choices, helds in zip(model.choices, reduced.held_bytes, strict=True)
                 for x, held in zip(choices, helds[:, position], strict=False) if held > 0}
        if terms:
            name = f"budget_{position}_{_word(word)}_{_BYTE_UNITS[power]}"
            _add_row(model, terms, pulp.LpConstraintLE, (limit - decided) / unit, name)


def cover(model: PlacementILP, picked: Sequence[int], position: int) -> None:
    """(4) Forbid all choices of `picked` with bytes at a position together, as they exceed the budget there."""
    heavy = [choices[number]
             for choices, helds, number in zip(model.choices, model.reduced.held_bytes, picked, strict=True)
             if choices and helds[number, position] > 0]
    _add_row(model, dict.fromkeys(heavy, 1.0), pulp.LpConstraintLE, len(heavy) - 1.0, f"cover_{model.covers}")
    model.covers += 1


def _add_variables(model: PlacementILP) -> None:
    reduced = model.reduced
    for index, left in enumerate(reduced.candidates):
        name = _word(reduced.problem.entities[index].name)
        numbers = left.tolist() if len(left) > 1 else []
        model.choices.append([_variable(model.program, f"x_{index}_{name}_{n}", binary=True) for n in numbers])
    for index in reduced.open_edges:
        name = _word(reduced.problem.edges[index].name)
        model.arcs[index] = [
            (arc, _variable(model.program, f"f_{index}_{name}_{number}_{_word(arc.source)}_{_word(arc.target)}"))
            for number, arc in enumerate(reduced.useful_arcs(index))
        ]


def _set_objective(model: PlacementILP, expected: float | None) -> None:
    reduced = model.reduced
    terms: dict[pulp.LpVariable, float] = {}
    for choices, cost in zip(model.choices, reduced.costs, strict=True):
        terms.update(zip(choices, cost.tolist(), strict=False))
    for index, arcs in model.arcs.items():
        multiplicity = reduced.problem.edges[index].multiplicity
        terms.update((f, multiplicity * arc.cost) for arc, f in arcs)
    positive = [cost for cost in terms.values() if cost > 0]
    if expected:
        model.unit = 2.0 ** round(math.log2(expected / _OBJECTIVE))
    elif positive:
        model.unit = 2.0 ** round(math.log2(float(np.median(positive))))
    terms[model.decided] = math.fsum(float(cost[0]) for cost in reduced.costs if len(cost) == 1)
    model.program.setObjective(pulp.LpAffineExpression({v: cost / model.unit for v, cost in terms.items()}))


def _variable(program: pulp.LpProblem, name: str, binary: bool = False) -> pulp.LpVariable:
    settings = (name, 0, 1, pulp.LpInteger if binary else pulp.LpContinuous)
    if hasattr(program, "add_variable"):  # from PuLP 3.3 on, where making an LpVariable directly is deprecated
        return program.add_variable(*settings)
    return pulp.LpVariable(*settings)


def _value(variable: pulp.LpVariable) -> float:
    return float(variable.varValue or 0.0)  # some solvers leave out zeros


def _add_row(model: PlacementILP, terms: dict[pulp.LpVariable, float], sense: int, right: float, name: str) -> None:
    model.program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, right))


@functools.lru_cache(maxsize=100_000)
def _word(name: str) -> str:
    """`name` as part of a name in an LP file, where names have a restricted alphabet and at most 100 characters."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("_")[:24]
