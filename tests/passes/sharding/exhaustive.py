"""The cheapest placements of a small graph by trying them all, from the rules of the game and nothing of the planner's.

What is taken from there: the price of one hop of a redistribution (`priced_hop`), and which operations form a group.

- Every operation takes a strategy per axis, and may reduce a small partial result at once.
- Inside a group a value has one layout, but what cannot be split where it is made may be read in part; and so may be what comes
  from outside, which on each axis is whole where its readers do not agree on a dim.
- Values between groups go the cheapest way, over shared copies: forward readers share one if there are several or if
  backward reads the value too, and backward readers share one if there are several.
- A parameter is stored whole or in parts along the outermost factor of a dim; its optimizer costs time by its elements. With
  `holds`, one that is trained may be gathered once, along some axes or all, and read from there.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.op_rules.base import REPLICATE
from passes.sharding.grouping.op_groups import SMALL_FRACTION, OpGroup
from passes.sharding.pricing.redistribution import priced_hop
from tests.helpers.axes import axes_of

Layout = tuple
Ports = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""Layouts of a group's inputs and outputs."""


def share(layouts: Sequence[Layout], sizes: Sequence[int]) -> float:
    return math.prod(1 / n for axis, n in enumerate(sizes) if any(isinstance(p[axis], tuple) for p in layouts))


def held(value: Value, layout: Layout, sizes: Sequence[int]) -> float:
    return value.bytes * share([layout], sizes)


def possible(value: Value, layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether the sizes of the axes divide the factors that they split."""
    for place in {p for p in layout if isinstance(p, tuple)}:
        if value.factors[place[0]][place[1]] % math.prod(n for p, n in zip(layout, sizes) if p == place):
            return False
    return True


class Game:
    def __init__(self, graph: PlacementGraph, sizes: tuple[int, ...], prices, groups: Sequence[OpGroup], holds: bool = False):
        self.holds = holds
        self.graph, self.sizes, self.prices, self.groups = graph, sizes, prices, groups
        self.whole = (REPLICATE,) * len(sizes)
        self.tables: dict[int, dict[tuple[Layout, Layout], float]] = {}
        self.owner = {i: c.index for c in groups for i in c.operations}

    # --- one group --------------------------------------------------------------------------------------------------

    def operation_ways(self, op: Operation, small: float) -> list[tuple]:
        """(layouts read, layouts made, layouts after reductions) of one operation."""
        ways = []
        for combination in itertools.product(op.strategies, repeat=len(self.sizes)):
            read = [tuple(s.inputs[k] for s in combination) for k in range(len(op.inputs))]
            made = [tuple(s.outputs[k] for s in combination) for k in range(len(op.outputs))]
            pairs = [*zip(op.inputs, read), *zip(op.outputs, made)]
            if not all(possible(self.graph.values[v], p, self.sizes) for v, p in pairs):
                continue
            for reducing in itertools.product((False, True), repeat=len(self.sizes)):
                after = []
                for v, p in zip(op.outputs, made):
                    fits = self.graph.values[v].bytes <= small
                    after.append(tuple(REPLICATE if r and fits and x in ("P", "M") else x for r, x in zip(reducing, p)))
                ways.append((tuple(read), tuple(made), tuple(after)))
        return list(dict.fromkeys(ways))

    def group_ways(self, group: OpGroup) -> dict[Ports, float]:
        """Ports -> the least cost of a group."""
        operations = [self.graph.operations[i] for i in group.operations]
        largest = max(self.graph.values[v].bytes for op in operations for v in (*op.inputs, *op.outputs))
        stuck = {v for op in operations if not any(s.splits for s in op.strategies) for v in op.outputs}
        found: dict[Ports, float] = {}

        def visit(k: int, known: dict[int, Layout], reads: tuple[tuple[int, Layout], ...], cost: float) -> None:
            if k == len(operations):
                if not all(possible(self.graph.values[v], known[v], self.sizes) and self.sliced(v, known[v], p)
                           for v, p in reads):
                    return
                ports = (tuple(known[v] for v in group.inputs), tuple(known[v] for v in group.outputs))
                if not any(op.heavy for op in operations) and any(op.kind != "view" for op in operations):
                    pairs = [*zip(group.inputs, ports[0]), *zip(group.outputs, ports[1])]
                    moved = sum(held(self.graph.values[v], p, self.sizes) for v, p in pairs)
                    cost += self.prices.kernel(0.0, moved, "float32", "pointwise")
                found[ports] = min(cost, found.get(ports, math.inf))
                return
            op = operations[k]
            for read, made, after in self.operation_ways(op, largest // SMALL_FRACTION):
                now, pairs = dict(known), list(zip(op.inputs, read))
                if all(self._arrives(v, p, now) if v in group.inputs else self._reads(v, p, now, stuck) for v, p in pairs):
                    now.update(zip(op.outputs, after))
                    from_outside = tuple(pair for pair in pairs if pair[0] in group.inputs)
                    visit(k + 1, now, reads + from_outside, cost + self.operation_us(op, read, made, after))

        visit(0, {}, (), 0.0)
        return found

    @staticmethod
    def _arrives(v: int, wanted: Layout, known: dict[int, Layout]) -> bool:
        """What comes from outside comes as all its readers want it, or whole."""
        have = known.get(v, wanted)
        if any(p != q and not all(x == REPLICATE or isinstance(x, tuple) for x in (p, q)) for p, q in zip(have, wanted)):
            return False
        known[v] = tuple(p if p == q else REPLICATE for p, q in zip(have, wanted))
        return True

    def _reads(self, v: int, wanted: Layout, known: dict[int, Layout], stuck: set[int]) -> bool:
        have = known.setdefault(v, wanted)
        return have == wanted or (v in stuck and self.sliced(v, have, wanted))

    def sliced(self, v: int, have: Layout, wanted: Layout) -> bool:
        """Whether a part can be cut out: outer axes first, as where several axes split one factor they are nested."""
        for axis in range(len(self.sizes)):
            if have[axis] != wanted[axis]:
                if have[axis] != REPLICATE or isinstance(wanted[axis], str) or wanted[axis] in have[axis + 1:]:
                    return False
                have = (*have[:axis], wanted[axis], *have[axis + 1:])
        return True

    def operation_us(self, op: Operation, read, made, after) -> float:
        cost = 0.0
        if op.heavy:
            pairs = [*zip(op.inputs, read), *zip(op.outputs, made)]
            moved = sum(held(self.graph.values[v], p, self.sizes) for v, p in pairs)
            flops = op.flops * share([*read, *made], self.sizes)
            cost += self.prices.kernel(flops, moved, self.graph.values[op.outputs[0]].spec.dtype, op.kind)
        for v, p, q in zip(op.outputs, made, after):
            for axis in range(len(self.sizes)):
                if p[axis] != q[axis]:
                    cost += self.prices.collective("all_reduce", axis, held(self.graph.values[v], p, self.sizes))
        return cost

    # --- values on their way ------------------------------------------------------------------------------------------

    def distances(self, v: int) -> dict[tuple[Layout, Layout], float]:
        """Floyd and Warshall over every layout that the value can have."""
        if v not in self.tables:
            value = self.graph.values[v]
            places = [(d, k) for d, row in enumerate(value.factors) for k in range(len(row))]
            layouts = [p for p in itertools.product((REPLICATE, "P", "M", *places), repeat=len(self.sizes))
                       if possible(value, p, self.sizes)]
            # Gradients share a collective: of all of them, up to the size of a bucket.
            trained = {p for _, p in self.graph.outputs if p is not None}
            bucket = min(4 * 2**20, sum(self.graph.values[p].bytes for p in trained)) if any(
                o == v and p is not None for o, p in self.graph.outputs) else 0.0
            table = {(p, q): 0.0 if p == q else math.inf for p in layouts for q in layouts}
            for p in layouts:
                for axis in range(len(self.sizes)):
                    for target in (REPLICATE, *places):
                        hop = priced_hop(value, p, axis, target, axes_of(*self.sizes), self.prices, bucket)
                        if hop is not None:
                            table[p, hop.target] = hop.cost
            for m, p, q in itertools.product(layouts, repeat=3):
                table[p, q] = min(table[p, q], table[p, m] + table[m, q])
            self.tables[v] = table
        return self.tables[v]

    def fan_out_us(self, v: int, source: Layout, forward: Sequence[Layout], backward: Sequence[Layout], kept: bool,
                   copies: Sequence[Layout]) -> float:
        """All ways from where a value is made to its readers; `copies`: layouts that a shared copy may have."""
        table = self.distances(v)

        def spread(start: Layout, ends: Sequence[Layout]) -> float:
            return sum(table[start, end] for end in ends)

        def shared_backward(start: Layout) -> float:
            if len(backward) < 2:
                return spread(start, backward)
            return min(table[start, c] + spread(c, backward) for c in copies)

        if kept:
            return min(table[source, c] + spread(c, forward) + shared_backward(c) for c in copies)
        if len(forward) > 1:
            return min(table[source, c] + spread(c, forward) for c in copies) + shared_backward(source)
        return spread(source, forward) + shared_backward(source)

    def value_us(self, v: int) -> Callable[[dict[int, Ports]], float]:
        """A function of the ports of the groups that make and read the value, as (group -> ports)."""
        graph, value = self.graph, self.graph.values[v]
        made_by = None if value.producer is None else self.owner[value.producer]
        made_backward = value.kind == "tangent" if made_by is None else self.groups[made_by].phase == BACKWARD
        readers = [c for c in self.groups if v in c.inputs]
        owners = [p for o, p in graph.outputs if o == v and p is not None]
        returned = sum(o == v and p is None for o, p in graph.outputs)
        forward = [c for c in readers if c.phase == FORWARD]
        backward = [c for c in readers if c.phase == BACKWARD]
        places = [(d, 0) for d, row in enumerate(value.factors) if row]
        storages = [p for p in itertools.product((REPLICATE, *places), repeat=len(self.sizes))
                    if possible(value, p, self.sizes)]

        def cost(ports: dict[int, Ports], copies: Sequence[Layout] | None = None) -> float:
            def wanted(cs):
                return [ports[c.index][0][c.inputs.index(v)] for c in cs]

            ends = [self.whole] * returned
            fs, bs = wanted(forward), wanted(backward)
            (bs if made_backward else fs).extend(ends)
            if value.kind == "parameter":
                gradients = [g for g, p in graph.outputs if p == v]
                best = math.inf
                for stored, start in [(p, q) for p in storages for q in self.starts(p, bool(gradients))]:
                    total = self.distances(v)[stored, start] + self.fan_out_us(v, start, fs, bs, False, self.copies(v))
                    for g in gradients:
                        producer = graph.values[g].producer
                        owner = self.groups[self.owner[producer]]
                        made = ports[owner.index][1][owner.outputs.index(g)]
                        total += self.distances(g)[made, stored]
                        local = held(value, stored, self.sizes) / value.spec.itemsize
                        total += self.prices.update(local, value.spec.dtype)
                    best = min(best, total)
                return best
            assert not owners or not (readers or returned), "a gradient that something else reads"
            if owners:
                return 0.0  # its way to where the parameter is stored is counted there
            source = self.whole if made_by is None else ports[made_by][1][self.groups[made_by].outputs.index(v)]
            kept = made_by is not None and not made_backward and bool(bs)
            return self.fan_out_us(v, source, fs, bs, kept, self.copies(v))

        return cost

    def starts(self, stored: Layout, trained: bool) -> list[Layout]:
        """Layouts from which a parameter goes to its readers."""
        ways = [{p, REPLICATE} if self.holds and trained else {p} for p in stored]
        return list(itertools.product(*ways))

    def copies(self, v: int) -> list[Layout]:
        value = self.graph.values[v]
        places = [(d, k) for d, row in enumerate(value.factors) for k in range(len(row))]
        return [p for p in itertools.product((REPLICATE, "P", "M", *places), repeat=len(self.sizes))
                if possible(value, p, self.sizes)]

    def involved(self, v: int) -> set[int]:
        """Groups whose ports decide what the value costs."""
        value = self.graph.values[v]
        found = {c.index for c in self.groups if v in c.inputs}
        if value.producer is not None:
            found.add(self.owner[value.producer])
        for g, p in self.graph.outputs:
            if p == v:
                found.add(self.owner[self.graph.values[g].producer])
        return found

    # --- the whole graph ----------------------------------------------------------------------------------------------

    def optimum(self, ways: Sequence[dict[Ports, float]] | None = None) -> float:
        """Depth first over groups; a branch ends where it costs as much as the best answer so far."""
        ways = ways or [self.group_ways(c) for c in self.groups]
        ordered = [sorted(w.items(), key=lambda kv: kv[1]) for w in ways]
        least = [0.0]
        for options in reversed(ordered):
            least.append(least[-1] + options[0][1])
        least.reverse()
        due: dict[int, list[int]] = {}
        seen = {v.index for v in self.graph.values if v.producer is None} | {v for c in self.groups for v in c.outputs}
        for v in seen:
            if self.involved(v):
                due.setdefault(max(self.involved(v)), []).append(v)
        costs = {v: self.value_us(v) for v in seen}
        memo: dict[tuple, float] = {}
        best = math.inf

        def value_cost(v: int, ports: dict[int, Ports]) -> float:
            key = (v, *(ports[c] for c in sorted(self.involved(v))))
            if key not in memo:
                memo[key] = costs[v](ports)
            return memo[key]

        def visit(k: int, ports: dict[int, Ports], cost: float) -> None:
            nonlocal best
            if k == len(ordered):
                best = min(best, cost)
                return
            for choice, own in ordered[k]:
                if cost + own + least[k + 1] >= best:
                    break
                ports[k] = choice
                total = cost + own + sum(value_cost(v, ports) for v in due.get(k, ()))
                if total + least[k + 1] < best:
                    visit(k + 1, ports, total)
            ports.pop(k, None)

        visit(0, {}, sum(costs[v]({}) for v in seen if not self.involved(v)))
        return best
