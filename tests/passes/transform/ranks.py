"""All ranks of a mesh in one process: their graphs run in lockstep, and collectives exchange what they hold."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import fx

from passes.graph.layouts import Layout
from passes.graph.placement_graph import Value
from passes.transform.collectives import MeshGroups
from tests.helpers.axes import axes_of

c10d = torch.ops._c10d_functional


def coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Of every rank, row-major."""
    return list(itertools.product(*(range(n) for n in sizes)))


def groups_of(sizes: Sequence[int]) -> list[MeshGroups]:
    names = tuple(f"axis{k}" for k in range(len(sizes)))
    return [MeshGroups(axes_of(*sizes), own, names) for own in coordinates(sizes)]


def cut(whole: torch.Tensor, value: Value, layout: Layout, groups: MeshGroups) -> torch.Tensor:
    """One rank's part of a value: each split factor is narrowed, by outer axes first."""
    shape = [f for size, row in zip(whole.shape, value.factors) for f in (row or (size,))]
    position = {}
    for d, row in enumerate(value.factors):
        for k in range(len(row) or 1):
            position[d, k] = len(position)
    x = whole.reshape(shape)
    for p, axis, c in zip(layout, groups.axes, groups.coordinates):
        if isinstance(p, tuple):
            x = x.chunk(axis.size, position[p])[c]
    sizes = [1] * whole.ndim
    for (d, _), at in position.items():
        sizes[d] *= x.shape[at]
    return x.reshape(sizes).contiguous()


def _peers(groups: Sequence[MeshGroups], rank: int, name: str) -> list[int]:
    """The ranks of a group, in order along its axis."""
    axis = groups[rank].names.index(name)
    own = groups[rank].coordinates
    return [r for r, g in enumerate(groups) if all(
        g.coordinates[a] == own[a] for a in range(len(own)) if a != axis)]


def _all_reduce(parts, mine, kind, _name):
    stacked = torch.stack(parts)
    return {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0)}[kind]()


def _all_gather(parts, mine, n, _name):
    assert len(parts) == n and all(p.is_contiguous() for p in parts)
    return torch.cat(parts)


def _reduce_scatter(parts, mine, kind, n, _name):
    assert len(parts) == n and kind == "sum" and all(p.is_contiguous() for p in parts)
    return torch.stack(parts).sum(0).chunk(n)[mine].clone()


def _all_to_all(parts, mine, out_splits, in_splits, _name):
    assert out_splits == in_splits == [1] * len(parts) and all(p.is_contiguous() for p in parts)
    return torch.cat([p[mine : mine + 1] for p in parts])


COLLECTIVES: dict[Callable, Callable] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
}


def run(graphs: Sequence[fx.GraphModule], groups: Sequence[MeshGroups], inputs: Sequence[Sequence]) -> list[list]:
    """What the graph of every rank returns. Random operators draw the same numbers on all ranks."""
    order = [list(gm.graph.nodes) for gm in graphs]
    assert len({len(nodes) for nodes in order}) == 1, "ranks that run different programs wait for ever"
    env: list[dict] = [{} for _ in graphs]
    given = [iter(own) for own in inputs]
    results: list[list] = []
    for nodes in zip(*order):
        (target,) = {str(n.target) for n in nodes if n.op != "placeholder"} or {""}
        calls = [fx.map_arg((n.args, n.kwargs), own.__getitem__) for n, own in zip(nodes, env)]
        state = torch.get_rng_state()
        for rank, (node, (args, kwargs)) in enumerate(zip(nodes, calls)):
            torch.set_rng_state(state)
            if node.op == "placeholder":
                env[rank][node] = next(given[rank])
            elif node.op == "get_attr":
                env[rank][node] = getattr(graphs[rank], node.target)
            elif node.op == "output":
                results.append(list(args[0]))
            elif node.target in COLLECTIVES:
                peers = _peers(groups, rank, node.args[-1])
                parts = [calls[p][0][0] for p in peers]
                env[rank][node] = COLLECTIVES[node.target](parts, peers.index(rank), *args[1:])
            elif node.target == c10d.wait_tensor.default:
                env[rank][node] = args[0]
            else:
                env[rank][node] = node.target(*args, **kwargs)
            _check(node, env[rank].get(node))
        assert target is not None
    return results


def _check(node: fx.Node, value) -> None:
    """The graph says of every value what it is: partitioning and lowering go by that."""
    fake = node.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor):
        assert (tuple(fake.shape), fake.dtype) == (tuple(value.shape), value.dtype), (node, fake, value.shape)
