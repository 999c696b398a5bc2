"""α-β costs of collectives (Hockney 1994): a message of B bytes takes α + B·β.

Every algorithm then takes (fixed µs) + nbytes · (µs per byte), a line, and a collective the cheapest of its lines.
`lines_of` makes the lines, of numbers or of symbols; `collective_us` takes the cheapest. With n ranks, B as
`CostModel.collective_us` defines nbytes, and β = slowdown / bandwidth, the algorithms are

    all_gather, reduce_scatter   ring        (n-1)·α + (n-1)/n·B·β
    all_reduce                   ring        reduce_scatter + all_gather
                                 tree        2·⌈log2 n⌉·α + 2·B·β          two trees, each half the bytes, pipelined
    all_to_all                   pairwise    (n-1)·α + (n-1)/n·B·β
                                 Bruck       ⌈log2 n⌉·(α + B/2·β)
    broadcast                    chain       (n-1)·α + B·β                 pipelined
                                 tree        ⌈log2 n⌉·(α + B·β)
    send_recv                                α + B·β

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005 (ring, pairwise,
Bruck, binomial tree); Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009 (all_reduce tree, which NCCL uses). all_gather and reduce_scatter have no tree, since neither NCCL nor gloo
uses one. send_recv on an axis of two levels is priced across nodes.

On an axis that runs inside nodes (g devices) and across them (h nodes), there is also the hierarchical way: across
nodes with B/g bytes per device, inside them with B; and all_to_all sends (n-g)/n of B through the NICs while (g-1)/n
go inside.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from passes.cost_model.algebra import NUMBERS, Algebra
from passes.cost_model.base import COLLECTIVE_KINDS
from passes.hardware.mesh import MeshAxis

Line = tuple[Any, Any]
"""(fixed µs, µs per byte)."""


class Ring(NamedTuple):
    """`size` devices (or nodes) in a ring: µs of a hop, and µs per byte sent."""

    size: Any
    alpha_us: Any
    beta: Any


def collective_us(kind: str, axis: MeshAxis, nbytes: float) -> float:
    """µs of one collective on an axis; see `CostModel.collective_us` for `nbytes`. 0 on an axis of size 1."""
    lines = collective_lines(kind, axis)
    fixed, per_byte = lines[0]
    best = fixed + nbytes * per_byte
    for fixed, per_byte in lines[1:]:
        us = fixed + nbytes * per_byte
        if us < best:
            best = us
    return best


@lru_cache(maxsize=4096)
def collective_lines(kind: str, axis: MeshAxis) -> tuple[Line, ...]:
    """The lines whose minimum is the cost: one per algorithm, on the axis as a whole and by levels."""
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"unknown collective {kind!r}; legal kinds: {', '.join(COLLECTIVE_KINDS)}")
    if axis.size == 1:
        return ((0.0, 0.0),)
    whole, *levels = (Ring(each.size, each.latency_us, 1e6 / each.bandwidth_bytes_per_s) for each in (axis, *axis.levels))
    return tuple(lines_of(kind, whole, levels, axis.slowdown.get(kind, 1.0), NUMBERS))


def lines_of(kind: str, whole: Ring, levels: Sequence[Ring], slowdown: Any, algebra: Algebra) -> list[Line]:
    """The lines for rings whose sizes are numbers or expressions. levels: inside nodes and across them, or none."""
    if kind == "send_recv":
        last = levels[-1] if levels else whole
        lines = [(last.alpha_us, last.beta)]
    elif kind == "all_to_all":
        lines = _all_to_all(whole, levels, algebra)
    elif kind == "broadcast":
        steps = algebra.steps(whole.size)
        lines = [((whole.size - 1) * whole.alpha_us, whole.beta), (steps * whole.alpha_us, steps * whole.beta)]
    else:
        lines = _flat(kind, whole, algebra) + (_hierarchical(kind, levels[0], levels[1], algebra) if levels else [])
    return [(fixed, per_byte * slowdown) for fixed, per_byte in lines]


def _flat(kind: str, ring: Ring, algebra: Algebra) -> list[Line]:
    """all_gather, reduce_scatter or all_reduce on homogeneous links."""
    n, alpha, beta = ring
    fixed, per_byte = (n - 1) * alpha, (n - 1) / n * beta
    if kind != "all_reduce":
        return [(fixed, per_byte)]
    return [(2 * fixed, 2 * per_byte), (2 * algebra.steps(n) * alpha, 2 * beta)]


def _hierarchical(kind: str, inner: Ring, outer: Ring, algebra: Algebra) -> list[Line]:
    """The same, inside nodes on all the bytes and across nodes on each device's part of them."""
    rounds = 2 if kind == "all_reduce" else 1
    [(inner_fixed, inner_per_byte)] = _flat("all_gather", inner, algebra)
    return [
        (rounds * inner_fixed + fixed, rounds * inner_per_byte + per_byte / inner.size)
        for fixed, per_byte in _flat(kind, outer, algebra)
    ]


def _all_to_all(whole: Ring, levels: Sequence[Ring], algebra: Algebra) -> list[Line]:
    n, slowest = whole.size, whole.beta
    per_byte = (n - 1) / n * slowest
    if levels:
        inner, outer = levels
        per_byte = algebra.largest((inner.size - 1) / n * inner.beta, (n - inner.size) / n * outer.beta)
        slowest = algebra.largest(inner.beta, outer.beta)
    steps = algebra.steps(n)
    return [((n - 1) * whole.alpha_us, per_byte), (steps * whole.alpha_us, steps / 2 * slowest)]
