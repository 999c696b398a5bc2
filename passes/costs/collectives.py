"""α-β costs of collectives (Hockney 1994): a message of B bytes takes α + B·β.

Every algorithm then takes (fixed µs) + nbytes · (µs per byte), a line, and a collective the cheapest of its lines.
`collective_lines` returns the lines, for whoever wants them as a formula; `collective_us` the time. With n ranks, B as
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

from functools import lru_cache

from passes.costs.base import COLLECTIVE_KINDS
from passes.machine.mesh import AxisLevel, MeshAxis

Line = tuple[float, float]
"""(fixed µs, µs per byte)."""


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
    whole = AxisLevel(axis.size, axis.latency_us, axis.bandwidth_bytes_per_s)
    if kind == "send_recv":
        lines = [_send_recv(axis.levels[-1] if axis.levels else whole)]
    elif kind == "all_to_all":
        lines = _all_to_all(whole, axis.levels)
    elif kind == "broadcast":
        lines = _broadcast(whole)
    else:
        lines = _flat(kind, whole) + (_hierarchical(kind, *axis.levels) if axis.levels else [])
    slowdown = axis.slowdown.get(kind, 1.0)
    return tuple((fixed, per_byte * slowdown) for fixed, per_byte in lines)


def _steps(size: int) -> int:
    """⌈log2 size⌉."""
    return (size - 1).bit_length()


def _beta(level: AxisLevel) -> float:
    return 1e6 / level.bandwidth_bytes_per_s


def _flat(kind: str, level: AxisLevel) -> list[Line]:
    """all_gather, reduce_scatter or all_reduce on links that are all alike."""
    n, alpha, beta = level.size, level.latency_us, _beta(level)
    ring = ((n - 1) * alpha, (n - 1) / n * beta)
    if kind != "all_reduce":
        return [ring]
    return [(2 * ring[0], 2 * ring[1]), (2 * _steps(n) * alpha, 2 * beta)]


def _hierarchical(kind: str, inner: AxisLevel, outer: AxisLevel) -> list[Line]:
    """The same, inside nodes on all the bytes and across nodes on each device's part of them."""
    rounds = 2 if kind == "all_reduce" else 1
    [(inner_fixed, inner_per_byte)] = _flat("all_gather", inner)
    return [
        (rounds * inner_fixed + fixed, rounds * inner_per_byte + per_byte / inner.size)
        for fixed, per_byte in _flat(kind, outer)
    ]


def _all_to_all(whole: AxisLevel, levels: tuple[AxisLevel, ...]) -> list[Line]:
    n = whole.size
    if levels:
        inner, outer = levels
        per_byte = max((inner.size - 1) / n * _beta(inner), (n - inner.size) / n * _beta(outer))
        slowest = max(_beta(inner), _beta(outer))
    else:
        slowest = _beta(whole)
        per_byte = (n - 1) / n * slowest
    return [((n - 1) * whole.latency_us, per_byte), (_steps(n) * whole.latency_us, _steps(n) / 2 * slowest)]


def _broadcast(level: AxisLevel) -> list[Line]:
    n, alpha, beta = level.size, level.latency_us, _beta(level)
    return [((n - 1) * alpha, beta), (_steps(n) * alpha, _steps(n) * beta)]


def _send_recv(level: AxisLevel) -> Line:
    return (level.latency_us, _beta(level))
