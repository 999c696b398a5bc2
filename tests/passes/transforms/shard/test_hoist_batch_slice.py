"""A graph that takes a rank's rows of its inputs -> one that is given them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.graph.fx_nodes import BY_COORDINATE
from passes.transforms.shard.hoist_batch_slice import HoistBatchSlice, batch_slices_of, part_of

WHOLE = torch.arange(24.0).view(4, 6)


def traced(function: Callable[..., Any], *given: torch.Tensor) -> fx.GraphModule:
    """With each slice marked as one of a rank's own."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        node.meta[BY_COORDINATE] = "where"
    return gm


def test_the_part_that_is_read_is_given():
    def rows(x, y):
        return x[2:4].sin() + x[2:4], y * 2

    gm = traced(rows, WHOLE, WHOLE.clone())
    HoistBatchSlice(("x_1", "y_1"))(gm)
    assert batch_slices_of(gm) == {"x_1": ((0, 2, 4),)}
    given = part_of(WHOLE, batch_slices_of(gm)["x_1"])
    value = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    assert (value.shape, value.stride()) == (given.shape, given.stride()) and value.storage_offset() == 0
    torch.testing.assert_close(gm(given, WHOLE), rows(WHOLE, WHOLE))


def test_a_part_of_a_part_is_given():
    def rows(x):
        return x[2:4][:, 3:6].exp()

    gm = traced(rows, WHOLE)
    HoistBatchSlice(("x_1",))(gm)
    assert batch_slices_of(gm) == {"x_1": ((0, 2, 4), (1, 3, 6))}
    given = part_of(WHOLE, batch_slices_of(gm)["x_1"])
    assert gm.graph.find_nodes(op="placeholder")[0].meta["val"].stride() == given.stride() == (6, 1)
    torch.testing.assert_close(gm(given), rows(WHOLE))


@pytest.mark.parametrize("function, inputs", [
    (lambda x: x[2:4] + x.sum(), ("x_1",)),
    (lambda x: x[2:4] + x[0:2], ("x_1",)),
    (lambda x: (x[2:4].sin(), x), ("x_1",)),
    (lambda x: x[2:4].sin(), ()),
], ids=["read whole", "two parts", "returned", "not an input of the model"])
def test_what_is_read_otherwise_stays(function, inputs):
    gm = traced(function, WHOLE)
    before = str(gm.graph)
    HoistBatchSlice(inputs)(gm)
    assert not batch_slices_of(gm) and str(gm.graph) == before


def test_a_slice_that_is_the_same_on_all_ranks_stays():
    gm = make_fx(lambda x: x[2:4].sin(), tracing_mode="fake")(WHOLE)
    HoistBatchSlice(("x_1",))(gm)
    assert not batch_slices_of(gm)
