"""Least recomputed time of a part of forward, such as one layer, against the bytes that it saves.

With a price for each saved byte, the least sum of that price and of recomputed time is a minimum cut. Let `there` of a storage
be 1 if it is saved or recomputed, and `again` of an operation if it runs in backward; a storage is saved where `there` exceeds
`again` of its maker. Then

    minimize    sum_v price * bytes[v] * (there[v] - again[maker of v])  +  sum_o us[o] * again[o]
    subject to  there[v] >= again[o]    where o reads or writes v
                there[v] = 1            where backward reads v

so that each row has two variables, and the choices are the closed sets of a graph. At falling prices, these are the corners of
the lower convex hull of all choices (as in any parametric minimum cut), which bounds many equal layers that choose apart, too.

Storages from elsewhere, such as a layer's input, are there in backward at no cost, which makes the hull lower than what a whole
program allows. An offloaded storage costs its transfers in place of bytes. Writing saved values is free.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from passes.simulation.memory.storage_program import StorageProgram

CLOSE = 1e-9
"""Relative distance below a chord at which a further corner counts."""
FAR = 1e6
"""Ratio of the first and last price to those at which all bytes, or all time, count as much as the least of the other."""


@dataclass(frozen=True)
class SavedChoice:
    """A choice of what is saved. us: recomputed, and of offloading; nbytes: saved in memory."""

    us: float
    nbytes: float
    saved: frozenset[int]

    def cost(self, price: float) -> float:
        return self.us + price * self.nbytes


def recompute_frontier(program: StorageProgram, runs: Collection[int], kept: Collection[int] = (),
                       ) -> tuple[SavedChoice, ...]:
    """The corners of the lower hull, most bytes first. runs: the operations of forward that count; kept: storages that are
    saved whatever they cost. Layers that stand for several count once."""
    part = _Part(program, runs, kept)
    total_us, total_bytes = (sum(found) or 1.0 for found in (part.us.values(), part.nbytes.values()))
    least_us, least_bytes = (min((x for x in found if x), default=1.0) for found in (part.us.values(), part.nbytes.values()))
    corners = [part.cut(least_us / total_bytes / FAR), part.cut(total_us / least_bytes * FAR)]
    waiting = [(corners[0], corners[1])]
    while waiting:
        more, less = waiting.pop()
        if more.nbytes - less.nbytes <= CLOSE * total_bytes or less.us - more.us <= CLOSE * total_us:
            continue
        price = (less.us - more.us) / (more.nbytes - less.nbytes)
        between = part.cut(price)
        if between.cost(price) < more.cost(price) - CLOSE * total_us:
            corners.append(between)
            waiting += [(more, between), (between, less)]
    return tuple(sorted({(each.nbytes, each.us): each for each in corners}.values(), key=lambda each: (-each.nbytes, each.us)))


def least_recompute_us(corners: Sequence[SavedChoice], nbytes: float) -> float:
    """No choice, nor any mean of several, that saves at most so many bytes recomputes less; infinite below the least bytes."""
    if nbytes >= corners[0].nbytes:
        return corners[0].us
    for more, less in pairwise(corners):
        if nbytes >= less.nbytes:
            return less.us - (less.us - more.us) * (nbytes - less.nbytes) / (more.nbytes - less.nbytes)
    return math.inf


class _Part:
    """nbytes: of each storage that the operations make and backward may need. us: of those that may run again. kept: storages
    that are saved."""

    def __init__(self, program: StorageProgram, runs: Collection[int], kept: Collection[int]):
        self.program, self.kept = program, frozenset(kept)
        self.nbytes = {s: float(program.storages[s].nbytes) for s in program.candidates if program.maker(s) in runs}
        self.offload_us = {s: program.storages[s].offload_us if s in program.offloadable else math.inf for s in self.nbytes}
        again = {program.maker(s) for s in self.nbytes if program.repeatable(s) and s not in self.kept}
        self.us = {k: program.runs[k].us for k in again}

    def cut(self, price: float) -> SavedChoice:
        """The choice with the least cost at this price of a byte."""
        program = self.program
        cost = {s: min(price * nbytes, self.offload_us[s]) for s, nbytes in self.nbytes.items()}
        graph, gains = nx.DiGraph(), {k: -us for k, us in self.us.items()}
        for s, each in cost.items():
            maker = program.maker(s)
            if maker in gains and program.repeatable(s) and s not in self.kept:
                gains[maker] += each
                graph.add_edge(("again", maker), ("there", s))
            if s in self.kept or s in program.wanted:
                graph.add_edge("source", ("there", s))
            graph.add_edge(("there", s), "sink", capacity=each)
        for k, gain in gains.items():
            graph.add_edges_from((("again", k), ("there", s)) for s in program.runs[k].reads if s in cost)
            if gain > 0.0:
                graph.add_edge("source", ("again", k), capacity=gain)
            elif gain < 0.0:
                graph.add_edge(("again", k), "sink", capacity=-gain)
        there = nx.minimum_cut(graph, "source", "sink", flow_func=nx.algorithms.flow.dinitz)[1][0] if "source" in graph else ()
        again = {k for k in self.us if ("again", k) in there}
        saved = frozenset(s for s in cost if ("there", s) in there and not (
            program.maker(s) in again and program.repeatable(s) and s not in self.kept))
        away = {s for s in saved if self.offload_us[s] < price * self.nbytes[s]}
        return SavedChoice(sum(self.us[k] for k in again) + sum(self.offload_us[s] for s in away),
                           sum(self.nbytes[s] for s in saved - away), saved)
