"""Random small placement graphs: chains and diamonds of matrix products, views, pointwise operations and sums."""
from __future__ import annotations

from hypothesis import strategies as st

from passes.graph.placement_graph import PlacementGraph
from tests.passes.graphs import Builder, V, aten

SIZES = (2, 4, 6)


@st.composite
def graphs(draw, most: int = 5) -> PlacementGraph:
    """Up to `most` operations, forward before backward; now and then one makes the gradient of a parameter, or has no
    rule. Everything that nothing reads is returned."""
    builder = Builder()
    shape = draw(st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)))
    live = [builder.input(shape)]
    if draw(st.booleans()):
        live.append(builder.input(shape))
    count = draw(st.integers(2, most))
    turn = draw(st.integers(1, count))
    owned: list[tuple[int, int]] = []
    for number in range(count):
        if number == turn and draw(st.booleans()):
            live.append(builder.input(draw(st.sampled_from(live_shapes(builder, live))), "tangent"))
        builder.backward = number >= turn
        x = live[-1] if draw(st.integers(0, 2)) else draw(st.sampled_from(live))
        live.append(_call(draw, builder, live, x, owned))
    return finish(builder, owned)


def live_shapes(builder: Builder, live: list[int]) -> list[tuple[int, ...]]:
    return [builder.values[v].spec.shape for v in live]


def finish(builder: Builder, owned: list[tuple[int, int]]) -> PlacementGraph:
    inside = {g for g, _ in owned}.union(*(op.inputs for op in builder.operations))
    loose = [v.index for v in builder.values if v.producer is not None and v.index not in inside]
    read = {v for op in builder.operations for v in op.inputs}
    return builder.finish([*loose, *[(g, p) for g, p in owned if g not in read]])


def _call(draw, builder: Builder, live: list[int], x: int, owned: list[tuple[int, int]]) -> int:
    shape = builder.values[x].spec.shape
    same = [v for v in live if builder.values[v].spec.shape == shape]
    kind = draw(st.sampled_from(("weight", "weight", "unary", "add", "mul", "product", "gradient", "softmax", "sum",
                                 "transpose", "unruled")))
    if kind == "weight" and len(shape) == 2:
        w = builder.input((shape[1], draw(st.sampled_from(SIZES))), "parameter")
        return builder.call(aten.mm.default, V(x), V(w))
    if kind in ("add", "mul"):
        target = aten.add.Tensor if kind == "add" else aten.mul.Tensor
        return builder.call(target, V(x), V(draw(st.sampled_from(same))))
    if kind == "product" and len(shape) == 2:
        fitting = [v for v in live if len(builder.values[v].spec.shape) == 2
                   and builder.values[v].spec.shape[0] == shape[1]]
        if fitting:
            return builder.call(aten.mm.default, V(x), V(draw(st.sampled_from(fitting))))
    if kind == "gradient" and builder.backward:
        free = [v.index for v in builder.values if v.kind == "parameter" and v.spec.shape == shape
                and v.index not in {p for _, p in owned}]
        if free:
            made = builder.call(aten.neg.default, V(x))
            owned.append((made, draw(st.sampled_from(free))))
            return x
    if kind == "softmax" and len(shape) == 2:
        return builder.call(aten._softmax.default, V(x), 1, False)
    if kind == "sum" and len(shape) == 2:
        return builder.call(aten.sum.dim_IntList, V(x), [draw(st.integers(0, 1))], True)
    if kind == "transpose" and len(shape) == 2:
        return builder.call(aten.permute.default, V(x), [1, 0])
    if kind == "unruled":
        return builder.call(aten.relu.default, V(x), ruled=False)
    return builder.call(aten.exp.default, V(x))


@st.composite
def stacked(draw) -> PlacementGraph:
    """Two or three equal blocks of a few random operations, one after another, in forward; then a few in backward."""
    builder = Builder()
    shape = (draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES)))
    x = builder.input(shape)
    kinds = draw(st.lists(st.sampled_from(("square", "unary", "softmax", "residual", "transpose")), min_size=1, max_size=4))
    blocks = draw(st.integers(2, 3))
    for number in range(blocks):
        builder.block = f"layers.{number}"
        x = _block(builder, x, kinds)
    builder.backward = True
    for number in reversed(range(blocks)):
        builder.block = f"layers.{number}"
        x = _block(builder, x, kinds[:2])
    builder.block = ""
    return finish(builder, [])


def _block(builder: Builder, x: int, kinds: list[str]) -> int:
    start = x
    for kind in kinds:
        shape = builder.values[x].spec.shape
        if kind == "square":
            x = builder.call(aten.mm.default, V(x), V(builder.input((shape[1], shape[1]), "parameter")))
        elif kind == "softmax":
            x = builder.call(aten._softmax.default, V(x), 1, False)
        elif kind == "residual" and builder.values[start].spec.shape == shape:
            x = builder.call(aten.add.Tensor, V(x), V(start))
        elif kind == "transpose":
            x = builder.call(aten.permute.default, V(x), [1, 0])
        else:
            x = builder.call(aten.exp.default, V(x))
    return x
