"""Symbolic cost of a training step: sympy formulas, and numeric evaluation at any size without a new trace.

A `SymbolicCost` is data: the terms of a plan (`passes.sharding.search.symbolic_terms`) with sizes interpolated between traced
points, and the cluster. `formulas` builds one; `formula_file` saves and loads it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import sympy

from hpml_compiler.instruments.cost_formulas.cost_parts import GraphTerms, in_block, one_with
from hpml_compiler.instruments.cost_formulas.term_expressions import TermExpressions, quantity_expression
from passes.cost_model.cost_terms import Kernel, Message, Term, price, sized
from passes.cost_model.formulas.symbolic_costs import SymbolicCosts, symbolic_axes
from passes.cost_model.measured.mesh_prices import CachedMeasurements, MeshPrices
from passes.cost_model.roofline import RooflineCost
from passes.errors import BadInput
from passes.hardware.cluster import Cluster, NodeGroup
from passes.hardware.mesh import mesh_from_pin
from passes.sharding.search.symbolic_terms import HELD, PARTS, Quantity, whole


@dataclass(frozen=True)
class StepCost:
    """Cost of a step per device in µs, bytes and FLOPs. memory_bytes: parameters, gradients, optimizer, activations, and
    peak, which includes the largest transient. sent_bytes: payloads of collectives."""

    step_time_us: float
    compute_us: float
    communication_us: float
    optimizer_us: float
    flops: float
    sent_bytes: float
    memory_bytes: dict[str, float]


@dataclass(frozen=True)
class Formulas:
    """`StepCost` as expressions in the symbols of a `SymbolicCost`."""

    compute_us: sympy.Expr
    communication_us: sympy.Expr
    optimizer_us: sympy.Expr
    flops: sympy.Expr
    sent_bytes: sympy.Expr
    memory_bytes: dict[str, sympy.Expr]
    overhead_us: float = 0.0

    @property
    def step_time_us(self) -> sympy.Expr:
        return self.compute_us + self.communication_us + self.optimizer_us + self.overhead_us


@dataclass(frozen=True)
class SymbolicCost:
    """Formulas of a plan. inputs, axes: name -> size in the plan, of input dims and of mesh axes. states: optimizer state
    tensors per parameter. measured: measured prices, if the plan uses them. notes: limitations of the formulas, as text."""

    inputs: dict[str, int]
    axes: dict[str, int]
    cluster: Cluster
    states: int
    graphs: tuple[GraphTerms, ...]
    notes: tuple[str, ...] = ()
    measured: CachedMeasurements | None = None

    @property
    def base(self) -> dict[str, int]:
        """The sizes of the plan: of the inputs, then of the mesh axes."""
        return {**self.inputs, **self.axes}

    @cached_property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """Symbols by name. They are positive integers but not declared so: sympy would compare the arguments of Max when only
        some symbols have values, and (in 1.14) drop the largest."""
        return {name: sympy.Symbol(name, real=True) for name in self.base}

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Paths of blocks in order; `blocks.*` is all repetitions of a block."""
        return tuple(dict.fromkeys(part.block for graph in self.graphs for part in graph.parts))

    # --- expressions ----------------------------------------------------------------------------------------------

    @cached_property
    def expressions(self) -> TermExpressions:
        """Converter of quantities and terms to sympy expressions."""
        mesh = mesh_from_pin(self.axes, self.cluster)
        axes = symbolic_axes(mesh, [self.symbols[n] for n in self.axes], self.cluster.devices_per_node)
        base = {self.symbols[n]: size for n, size in self.base.items()}
        return TermExpressions(
            tuple(self.symbols[n] for n in self.inputs), tuple(self.symbols[n] for n in self.axes),
            SymbolicCosts(RooflineCost(mesh.device, mesh), axes, base), MeshPrices(mesh, self.states, self.measured),
            None if self.measured is None else self._values_at(self.base))

    def formulas(self, name: str | None = None) -> Formulas:
        """Formulas of the whole step, or of `name`: a block (`blocks.*`, or `blocks.3` for one of them), a node or a
        parameter, including redistributions for it. Raises BadInput for unknown names, listing the blocks."""
        chosen, quantity = self.select(name), self.expressions.quantity
        us: dict[str, list[sympy.Expr]] = {part: [] for part in PARTS}
        held: dict[str, list[sympy.Expr]] = {part: [] for part in HELD}
        flops, sent, transients = [], [], []
        for graph, weights in zip(self.graphs, chosen):
            for charge in graph.bill.charges:
                count = charge.count * weights.get(charge.entity, 0.0)
                if not count:
                    continue
                us[charge.part].append(_number(count) * self.expressions.term(charge.term))
                if isinstance(charge.term, Kernel):
                    flops.append(_number(count) * quantity(charge.term.flops))
                elif isinstance(charge.term, Message):
                    sent.append(_number(count) * quantity(charge.term.bytes))
            for each in graph.bill.held:
                if count := each.count * weights.get(each.entity, 0.0):
                    held[each.part].append(_number(count) * quantity(each.bytes))
            if name is None:
                transients.append(_max([quantity(q) for q in _undominated(graph.bill.transients)]))
        memory = {part: sympy.Add(*terms) for part, terms in held.items()}
        if name is None:
            memory["peak"] = sympy.Add(*memory.values(), *transients)
        overhead = sum(graph.overhead_us for graph in self.graphs) if name is None else 0.0
        return Formulas(sympy.Add(*us["compute"]), sympy.Add(*us["communication"]), sympy.Add(*us["optimizer"]),
                        sympy.Add(*flops), sympy.Add(*sent), memory, overhead)

    @cached_property
    def total(self) -> Formulas:
        return self.formulas()

    @property
    def step_time_us(self) -> sympy.Expr:
        return self.total.step_time_us

    @property
    def compute_us(self) -> sympy.Expr:
        return self.total.compute_us

    @property
    def communication_us(self) -> sympy.Expr:
        return self.total.communication_us

    @property
    def optimizer_us(self) -> sympy.Expr:
        return self.total.optimizer_us

    @property
    def memory_bytes(self) -> dict[str, sympy.Expr]:
        return self.total.memory_bytes

    def select(self, name: str | None) -> list[dict[int, float]]:
        """Per graph: entity -> the fraction of its instances that `name` covers."""
        if name is None:
            return [dict.fromkeys(range(len(graph.parts)), 1.0) for graph in self.graphs]
        found = [in_block(graph, name) or one_with(graph, name) for graph in self.graphs]
        if not any(found):
            raise BadInput(f"the model has no block, node or parameter {name!r}", "formulas",
                           f"the blocks are {', '.join(self.blocks)}")
        return found

    # --- numbers --------------------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> dict[Quantity, int]:
        """All quantities -> their index in `_numbers`."""
        bills = [graph.bill for graph in self.graphs]
        found: list[Quantity] = []
        for bill in bills:
            for charge in bill.charges:
                sized(charge.term, found.append)
        found += [each.bytes for bill in bills for each in bill.held]
        found += [q for bill in bills for q in bill.transients]
        found += [whole(limit.factor) for bill in bills for limit in bill.limits]
        return {quantity: k for k, quantity in enumerate(dict.fromkeys(found))}

    @cached_property
    def _numbers(self) -> Callable[..., Sequence[float]]:
        """All quantities of `_table` as a function of the sizes, in the order of `base`."""
        inputs, axes = ([self.symbols[n] for n in names] for names in (self.inputs, self.axes))
        expressions = [quantity_expression(q, inputs, axes) for q in self._table]
        return sympy.lambdify(list(self.symbols.values()), expressions, modules="math", cse=True)

    def _values_at(self, at: dict[str, int]) -> dict[Quantity, float]:
        numbers = self._numbers(*(at[name] for name in self.base))
        return {quantity: float(numbers[k]) for quantity, k in self._table.items()}

    def evaluate(self, name: str | None = None, *, cluster: Cluster | str | None = None, check: bool = True,
                 **sizes: int) -> StepCost:
        """Cost of the step at other sizes of input dims (batch=64) and mesh axes (dp=4); other sizes are the plan's.

        Placements stay, and the cost model prices all terms on the links of the new mesh. cluster: for another number of
        devices; by default more or fewer nodes like the plan's, or fewer devices in its only node. name: as in `formulas`.
        Raises BadInput for unknown sizes, and, unless `check` is off, if an axis does not divide a dim that it shards.
        """
        at = {**self.base, **sizes}
        if unknown := [each for each in sizes if each not in self.base]:
            raise BadInput(f"{unknown[0]!r} is no size of the formulas", "what-if", f"the sizes are {', '.join(self.base)}")
        if wrong := {k: n for k, n in at.items() if type(n) is not int or n < 1}:
            raise BadInput(f"sizes are whole numbers above 0, not {wrong}", "what-if", "write --what-if batch=64")
        axes = {axis: at[axis] for axis in self.axes}
        mesh = mesh_from_pin(axes, self.cluster_for(prod(axes.values())) if cluster is None else parsed(cluster))
        value = self._values_at(at)
        if check:
            self._check(value, axes)
        return self._sum(name, value, MeshPrices(mesh, self.states, self.measured))

    def _sum(self, name: str | None, value: dict[Quantity, float], prices: MeshPrices) -> StepCost:
        us: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        held: dict[str, float] = dict.fromkeys(HELD, 0.0)
        flops = sent = transient = 0.0
        known: dict[Term[Quantity], float] = {}
        for graph, weights in zip(self.graphs, self.select(name)):
            for charge in graph.bill.charges:
                count, term = charge.count * weights.get(charge.entity, 0.0), charge.term
                if not count:
                    continue
                if term not in known:
                    known[term] = price(sized(term, value.__getitem__), prices)
                us[charge.part] += count * known[term]
                flops += count * value[term.flops] if isinstance(term, Kernel) else 0.0
                sent += count * value[term.bytes] if isinstance(term, Message) else 0.0
            for each in graph.bill.held:
                held[each.part] += each.count * weights.get(each.entity, 0.0) * value[each.bytes]
            if name is None:
                transient += max((value[q] for q in graph.bill.transients), default=0.0)
        memory = {**held, "peak": sum(held.values()) + transient} if name is None else held
        overhead = sum(graph.overhead_us for graph in self.graphs) if name is None else 0.0
        return StepCost(sum(us.values()) + overhead, us["compute"], us["communication"], us["optimizer"], flops, sent, memory)

    def _check(self, value: dict[Quantity, float], axes: dict[str, int]) -> None:
        sizes, names = list(axes.values()), list(axes)
        for graph in self.graphs:
            for limit in graph.bill.limits:
                factor, ways = value[whole(limit.factor)], prod(sizes[k] for k in limit.axes)
                if factor % ways:
                    split = " x ".join(f"{names[k]}={sizes[k]}" for k in limit.axes)
                    raise BadInput(f"{split} does not divide {factor:g}, a dim of {limit.name} that the plan splits",
                                   "what-if", "choose a size that divides, or plan again at that size")

    def cluster_for(self, world: int) -> Cluster:
        """Cluster of `world` devices in nodes like the plan's: more or fewer nodes, or part of one."""
        old = self.cluster
        if world == old.world_size:
            return old
        group, per_node = old.group, old.devices_per_node
        nodes, devices = (world // per_node, per_node) if world % per_node == 0 else (1, world)
        if devices > per_node and old.nodes > 1:
            raise BadInput(f"{world} devices are no whole number of nodes with {per_node} each", "what-if",
                           "give the cluster that they are in")
        rest = {k: v for k, v in vars(group).items() if k not in ("nodes", "devices_per_node")}
        return Cluster((NodeGroup(nodes, devices, **rest),))


def parsed(cluster: Cluster | str) -> Cluster:
    """Parse the text of a cluster; a Cluster is returned as it is."""
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


def _number(count: float) -> sympy.Expr:
    return sympy.Integer(int(count)) if count == int(count) else sympy.nsimplify(count, rational=True)


def _undominated(quantities: Sequence[Quantity]) -> list[Quantity]:
    """Quantities that are not dominated by another one in every coefficient."""
    kept: list[dict] = []

    def above(a: dict, b: dict) -> bool:
        return all(a.get(key, 0) >= factor for key, factor in b.items())

    for new in map(dict, dict.fromkeys(quantities)):
        if not any(above(old, new) for old in kept):
            kept = [old for old in kept if not above(new, old)] + [new]
    return [tuple(sorted(each.items())) for each in kept]


def _max(expressions: Sequence[sympy.Expr]) -> sympy.Expr:
    if len(expressions) < 2:
        return expressions[0] if expressions else sympy.Integer(0)
    return sympy.Max(*expressions, evaluate=False)
