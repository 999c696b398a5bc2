from __future__ import annotations

import torch
from torch.fx import GraphModule, symbolic_trace

from tests.goldens.recorder import digest_of, text_of, untimed


def graph(function) -> GraphModule:
    gm = symbolic_trace(function)
    for node in gm.graph.nodes:
        node.meta["val"] = torch.zeros(2, 3, device="meta")
    return gm


def digest(gm: GraphModule) -> str:
    return digest_of(text_of(gm))


def test_names_of_nodes_do_not_count():
    before, after = (graph(lambda x, y: torch.sub(x, y)) for _ in range(2))
    for node in after.graph.nodes:
        node.name = f"other_{node.name}"
    assert digest(after) == digest(before)


def test_the_order_of_arguments_counts():
    assert digest(graph(lambda x, y: torch.sub(x, y))) != digest(graph(lambda x, y: torch.sub(y, x)))


def test_strides_count():
    before, after = (graph(lambda x: torch.neg(x)) for _ in range(2))
    [*after.graph.nodes][1].meta["val"] = torch.zeros(3, 2, device="meta").T
    assert digest(after) != digest(before)


def test_seconds_of_plans_do_not_count():
    assert untimed({"cost": 3, "seconds": {"solve": 1.0}, "graphs": [{"seconds": 2, "name": "a"}]}) == {
        "cost": 3, "graphs": [{"name": "a"}]}
