"""`as_strided` becomes views: the same values, the same order in memory, and nothing where views cannot say it."""
from __future__ import annotations

import math
import random

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.transforms.cleanup.as_strided_views import as_views, scattered
from passes.transforms.rewriting.call_inserter import CallInserter

aten = torch.ops.aten


def stored(shape, strides) -> torch.Tensor:
    return torch.empty_strided(shape, strides).copy_(torch.arange(math.prod(shape)).view(shape))


def rewritten(x: torch.Tensor, size, stride, offset, source: torch.Tensor | None = None) -> tuple[torch.Tensor, list[str]]:
    """What the rewritten call gives, and its functions."""
    graph, fakes, given = fx.Graph(), FakeTensorMode(), [x] if source is None else [x, source]
    nodes = []
    for k, tensor in enumerate(given):
        nodes.append(graph.placeholder(f"x{k}"))
        with fakes:
            nodes[-1].meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    target = aten.as_strided.default if source is None else aten.as_strided_scatter.default
    node = graph.call_function(target, (*nodes, list(size), list(stride), offset))
    graph.output(node)
    if (as_views if source is None else scattered)(node, CallInserter(graph, node, fake_mode=fakes)):
        graph.erase_node(node)
    names = [n.target.__name__.split(".")[0] for n in graph.nodes if n.op == "call_function"]
    return fx.GraphModule({}, graph)(*given), names


CASES = {
    "transposed": ((6, 8), (8, 1), (8, 6), (1, 8), 0, "view permute"),
    "channels last": ((2, 3, 4, 4), (48, 1, 12, 3), (2, 3, 4, 4), (48, 1, 12, 3), 0, "permute view permute"),
    "flattened": ((6, 8), (8, 1), (48,), (1,), 0, "view view"),
    "taken apart": ((6, 8), (8, 1), (2, 3, 2, 4), (24, 8, 4, 1), 0, "view"),
    "every second row": ((6, 8), (8, 1), (3, 8), (16, 1), 8, "view slice permute view"),
    "columns": ((6, 8), (8, 1), (6, 3), (8, 1), 2, "view slice"),
    "one column": ((6, 8), (8, 1), (6,), (8,), 3, "view slice view"),
    "expanded": ((6, 8), (8, 1), (6, 5, 8), (8, 0, 1), 0, "view view expand"),
    "windows that overlap": ((2, 12, 4), (48, 4, 1), (2, 5, 4, 4), (48, 8, 4, 1), 0, "view unfold permute"),
    "a diagonal": ((6, 8), (8, 1), (5,), (9,), 0, "as_strided"),
    "rows twice": ((6, 8), (8, 1), (5, 2, 8), (8, 8, 1), 0, "as_strided"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_view_of_memory_becomes_views_of_dims(name):
    shape, strides, size, stride, offset, functions = CASES[name]
    x = stored(shape, strides)
    got, names = rewritten(x, size, stride, offset)
    assert torch.equal(got, x.as_strided(size, stride, offset)) and names == functions.split()


def random_call(rng: random.Random) -> tuple | None:
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 3))]
    strides, step = [0] * len(shape), 1
    for d in rng.sample(range(len(shape)), len(shape)):
        strides[d], step = step, step * shape[d]
    rank = rng.randint(1, 3)
    size = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rank)]
    stride = [rng.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in range(rank)]
    offset = rng.choice([0, 0, 0, 1, 2, 3, 5])
    fits = offset + sum((n - 1) * t for n, t in zip(size, stride)) < step
    return (stored(shape, strides), size, stride, offset) if fits else None


def test_random_views_of_memory_and_writes_through_them():
    rng, seen = random.Random(0), {"as_strided": 0, "as_strided_scatter": 0, "all": 0}
    for call in filter(None, (random_call(rng) for _ in range(1200))):
        x, size, stride, offset = call
        whole = x.as_strided(size, stride, offset)
        got, names = rewritten(*call)
        assert torch.equal(got, whole), call
        assert "as_strided" in names or all(
            a == b for n, a, b in zip(size, got.stride(), stride) if n > 1), (call, got.stride())
        seen["as_strided"] += "as_strided" in names
        seen["all"] += 1
        if whole.unique().numel() == whole.numel():  # one place for each element of the source
            source = torch.rand(size)
            got, names = rewritten(*call, source)
            assert torch.equal(got, aten.as_strided_scatter(x, source, size, stride, offset)), call
            seen["as_strided_scatter"] += "as_strided_scatter" in names
    assert seen["all"] > 350 and seen["as_strided"] < seen["all"] / 2
