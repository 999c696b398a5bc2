"""Run the graphs of all ranks in one process, node by node, with collectives done between their values.

Ranks of one program have the same nodes in the same order, so no threads and no process group are needed. What draws
random numbers is run once: seeded alike, all ranks draw the same.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.compat import pytree
from passes.rules.table import is_random
from passes.transform.collectives import MeshGroups

c10d = torch.ops._c10d_functional


def mesh_groups(sizes: tuple[int, ...]) -> list[MeshGroups]:
    """The place of every rank of a mesh, row by row."""
    names = tuple(f"axis{k}" for k in range(len(sizes)))
    return [MeshGroups(sizes, c, names) for c in itertools.product(*map(range, sizes))]


def run(graphs: Sequence[fx.Graph], groups: Sequence[MeshGroups], inputs: Sequence[Sequence[Any]]) -> list[Any]:
    """What every rank's graph returns; `inputs[rank]` are the values of its placeholders."""
    ranks = range(len(graphs))
    envs: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    feeds = [iter(values) for values in inputs]
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        first = nodes[0]
        assert all((n.op, n.target) == (first.op, first.target) for n in nodes), "ranks run different programs"
        if first.op == "placeholder":
            results = [next(feed) for feed in feeds]
        else:
            loaded = [_load(node, env) for node, env in zip(nodes, envs)]
            if first.op == "output":
                return [args[0] for args, _ in loaded]
            results = _call(first.target, loaded, groups)
        for env, node, result in zip(envs, nodes, results):
            env[node] = result
    raise AssertionError("a graph has an output")


def _load(node: fx.Node, env: dict[fx.Node, Any]) -> tuple[tuple, dict]:
    return pytree.tree_map(
        lambda x: env[x] if isinstance(x, fx.Node) else x, (node.args, dict(node.kwargs)),
        is_leaf=lambda x: isinstance(x, fx.Node),
    )


def _call(target: Any, loaded: list[tuple[tuple, dict]], groups: Sequence[MeshGroups]) -> list[Any]:
    if is_random(target):
        drawn = target(*loaded[0][0], **loaded[0][1])
        return [drawn for _ in loaded]
    if getattr(target, "namespace", "") != "_c10d_functional":
        return [target(*args, **kwargs) for args, kwargs in loaded]
    if target is c10d.wait_tensor.default:
        return [args[0] for args, _ in loaded]
    args = loaded[0][0]
    (name,) = [a for a in args if isinstance(a, str) and a.startswith("axis")]
    axis = int(name.removeprefix("axis"))
    values = [args[0] for args, _ in loaded]
    assert all(v.is_contiguous() for v in values), "collectives move packed tensors"
    results = []
    for place in groups:
        peers = [v for v, g in zip(values, groups) if _beside(g.coordinates, place.coordinates, axis)]
        results.append(_collective(target, args, peers, place.coordinates[axis]))
    return results


def _beside(a: tuple[int, ...], b: tuple[int, ...], axis: int) -> bool:
    return all(x == y for k, (x, y) in enumerate(zip(a, b)) if k != axis)


def _collective(target: Any, args: tuple, peers: list[torch.Tensor], mine: int) -> torch.Tensor:
    n = len(peers)
    if target is c10d.all_gather_into_tensor.default:
        assert args[1] == n
        return torch.cat(peers)
    if target is c10d.all_reduce.default:
        return torch.stack(peers).sum(0, dtype=peers[0].dtype) if args[1] == "sum" else torch.stack(peers).amax(0)
    if target is c10d.reduce_scatter_tensor.default:
        assert args[1:3] == ("sum", n)
        return sum(peers[1:], peers[0]).chunk(n)[mine].clone()
    if target is c10d.all_to_all_single.default:
        assert list(args[1]) == list(args[2])
        return torch.cat([p.split(list(args[2]))[mine] for p in peers])
    raise AssertionError(f"unknown collective {target}")
