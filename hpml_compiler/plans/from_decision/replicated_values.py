"""Values that a plan leaves replicated because no mesh axis divides them, and the size or factor that prevents it."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from hpml_compiler.plans.from_decision.user_names import UserNames
from hpml_compiler.plans.schema import ReplicatedValue
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.placement_graph import Value
from passes.hardware.mesh import Mesh


def left_whole(annotated: AnalyzedGraph, mesh: Mesh, listed: UserNames) -> list[ReplicatedValue]:
    """Operators without a sharding rule, and heavy operations and parameters that no axis of the mesh can split, with the sizes
    that prevent it. None on a mesh of one device, which could split nothing."""
    if all(size == 1 for size in mesh.shape):
        return []
    graph = annotated.graph
    found = [
        ReplicatedValue(name=node, reason=f"{target} has no rule")
        for target, nodes in graph.unruled.items() for node in nodes
    ]
    for value in graph.values:
        if value.kind == "parameter" and value.spec.shape:
            _note_if_blocked(found, listed.values[value.index], mesh,
                             [[(value, d, k)] for d, row in enumerate(value.factors) for k in range(len(row))], _describe_dim)
    for op in graph.operations:
        if op.heavy and op.ruled:
            _note_if_blocked(found, op.name, mesh, [
                [(graph.values[v], *p) for v, p in zip(op.inputs + op.outputs, s.inputs + s.outputs) if isinstance(p, tuple)]
                for s in op.strategies if s.splits
            ])
    return found


def _note_if_blocked(found: list[ReplicatedValue], name: str, mesh: Mesh, ways: Sequence[Sequence[tuple[Value, int, int]]],
                     describe: Callable[[Value, int, int], str] | None = None) -> None:
    """Record `name` if no axis can split it. `ways`: the ways to split it on one axis, each with the (value, dim, factor)
    triples that the axis has to divide."""
    describe = describe or _describe_factor
    sizes = [n for n in mesh.shape if n > 1]
    if not any(all(value.factors[d][k] % n == 0 for value, d, k in way) for way in ways for n in sizes):
        blocking = dict.fromkeys(
            next(describe(*place) for n in sizes for place in way if place[0].factors[place[1]][place[2]] % n)
            for way in ways if sizes)
        if blocking:
            axes = ", ".join(f"{axis}={n}" for axis, n in zip(mesh.names, mesh.shape) if n > 1)
            found.append(ReplicatedValue(name=name, reason=f"no axis ({axes}) divides {', '.join(blocking)}"))


def _describe_dim(value: Value, dim: int, factor: int) -> str:
    """Text such as `dim 1 (100)`, or `a factor of dim 0 (45 = 3 x 5 x 3)` where views split the dim."""
    factors, size = value.factors[dim], value.spec.shape[dim]
    return f"dim {dim} ({size})" if len(factors) == 1 else f"a factor of dim {dim} ({size} = {' x '.join(map(str, factors))})"


def _describe_factor(value: Value, dim: int, factor: int) -> str:
    """Text such as `dim 1 (100)`, or `the outer factor 3 of dim 0 (1152 = 3 x 6 x 64)` where views split the dim."""
    factors, size = value.factors[dim], value.spec.shape[dim]
    if len(factors) == 1:
        return f"dim {dim} ({size})"
    which = "the outer factor" if factor == 0 else f"factor {factor},"
    return f"{which} {factors[factor]} of dim {dim} ({size} = {' x '.join(map(str, factors))})"
