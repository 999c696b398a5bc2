"""A loop's sums of products -> added in one memory; sums that something else reads keep theirs."""
from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from passes import compat
from passes.compat.codegen.inductor import LOOP_TURN
from passes.compat.patching.patches import PATCHES

A, B = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(2, 3, 20).view(4, 5)
FUNCTIONS = {
    "sum of three": (lambda total, a, b: (((a @ b) + (a @ b.sin())) + (a.cos() @ b), ), 2),
    "first sum returned": (lambda total, a, b: (lambda one: ((one + (a @ b.sin())) + (a.cos() @ b), one))(a @ b), 1),
    "input": (lambda total, a, b: ((total + (a @ b)) + (a.cos() @ b), ), 1),
    "row": (lambda total, a, b: (total[0] + (a @ b), ), 0),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_are_added_in_place(name, reuse):
    function, in_place = FUNCTIONS[name]
    total = torch.arange(30.0).view(6, 5)
    gm = make_fx(function, tracing_mode="fake")(total, A, B)
    for turn, node in enumerate(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)):
        node.meta[LOOP_TURN] = turn
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    call = compat.compile_with_inductor(gm, values, static_inputs=(), is_backward=False, is_inference=True, reuse=reuse)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = call([total, A, B])
    added = sum(event.name == "hpml::add_product_" for event in profile.events())
    assert added == in_place
    for one, other in zip(found, function(torch.arange(30.0).view(6, 5), A, B), strict=True):
        torch.testing.assert_close(one, other)
    assert total.equal(torch.arange(30.0).view(6, 5)), "an input is not overwritten"
    assert PATCHES["inplaceable_ops"].probe() is None
