"""All ranks of a mesh in one process: their graphs run from collective to collective, which exchange what they hold."""
from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import fx

from passes import compat
from passes.graph.layouts import Layout
from passes.graph.placement_graph import Value
from passes.transforms.shard.rank_coordinate import COORDINATE
from passes.transforms.shard.redistributor import MeshGroups
from tests.helpers.axes import axes_of

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
RELEASE = Version(torch.__version__).release


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


def _all_gather_together(parts, mine, n, name):
    return [_all_gather(each, mine, n, name) for each in zip(*parts)]


def _reduce_scatter(parts, mine, kind, n, _name):
    assert len(parts) == n and kind == "sum" and all(p.is_contiguous() for p in parts)
    return torch.stack(parts).sum(0).chunk(n)[mine].clone()


def _all_to_all(parts, mine, out_splits, in_splits, _name):
    assert out_splits == in_splits == [1] * len(parts) and all(p.is_contiguous() for p in parts)
    return torch.cat([p[mine : mine + 1] for p in parts])


COLLECTIVES: dict[Callable, Callable] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_gather_into_tensor_coalesced.default: _all_gather_together,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
}


def run(graphs: Sequence[fx.GraphModule], groups: Sequence[MeshGroups], inputs: Sequence[Sequence]) -> list[list]:
    """What the graph of every rank returns. Each runs to its next collective, which all have to reach. Random operators draw
    the same numbers on all ranks."""
    programs = [_program(gm, own, place) for gm, own, place in zip(graphs, inputs, groups, strict=True)]
    states = [torch.get_rng_state() for _ in programs]
    got: list = [None for _ in programs]
    while True:
        results: list = []
        calls: list[tuple[fx.Node, tuple]] = []
        for rank, program in enumerate(programs):
            torch.set_rng_state(states[rank])
            try:
                calls.append(program.send(got[rank]))
            except StopIteration as end:
                results.append(end.value)
            states[rank] = torch.get_rng_state()
        assert not (results and calls) and len({str(node.target) for node, _ in calls}) <= 1, (
            "ranks that run different programs wait for ever")
        if results:
            return results
        for rank, (node, args) in enumerate(calls):
            peers = _peers(groups, rank, str(node.args[-1]))
            parts = [calls[p][1][0] for p in peers]
            got[rank] = COLLECTIVES[node.target](parts, peers.index(rank), *args[1:])  # type: ignore[index]


def _program(gm: fx.GraphModule, inputs: Sequence, place: MeshGroups) -> Generator[tuple[fx.Node, tuple], Any, list]:
    """Yields a collective with its arguments, and is sent its result."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = getattr(gm, node.target)
        elif node.op == "output":
            return list(args[0])
        elif node.target in COLLECTIVES:
            env[node] = yield node, args
        elif node.target == COORDINATE:
            env[node] = torch.tensor(place.coordinate_of[args[0]])
        elif node.target == c10d.wait_tensor.default:
            env[node] = args[0]
        else:
            env[node] = _as_described(node, node.target(*args, **kwargs))
        _check(node, env[node], (args, kwargs))
    raise AssertionError("a graph ends with what it returns")


def _as_described(node: fx.Node, value):
    """Fakes of torch 2.11 have other strides than FFTs on a CPU make, wherever a dim but the last is transformed. Inductor
    stops there with an error, on one device too; here the graph is believed."""
    fake = node.meta.get("val")
    if RELEASE < (2, 12) and "_fft_" in str(node.target) and isinstance(fake, torch.Tensor):
        return torch.empty_strided(fake.shape, fake.stride(), dtype=value.dtype).copy_(value)
    return value


def _check(node: fx.Node, value, read) -> None:
    """The graph says of every value what it is: partitioning and lowering go by that. A value of which torch does not say it is
    marked as mistaken, for other graphs that read it, too: attention's logsumexp of float64 on a CPU and what is made of that.
    Up to torch 2.12 these are float32 by their fakes, and inductor stops with an error, on one device too."""
    fake = node.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor):
        assert tuple(fake.shape) == tuple(value.shape), (node, fake, value.shape)
        if fake.dtype != value.dtype:
            known = _is_logsumexp(node) or any(hasattr(x, "mistaken") for x in compat.pytree.tree_leaves((value, read)))
            assert RELEASE < (2, 13) and known, (node, fake, value.dtype)
            value.mistaken = True  # type: ignore[attr-defined]


def _is_logsumexp(node: fx.Node) -> bool:
    made_by = aten._scaled_dot_product_flash_attention_for_cpu.default
    return node.target is operator.getitem and node.args[1:] == (1,) and getattr(node.args[0], "target", None) is made_by
