"""A graph -> its callables of `compiler: "eager"`."""
from __future__ import annotations

import weakref

import torch
from torch.fx import Graph, GraphModule

from hpml_compiler.compile.lower.lowering import interpreted


def test_results_that_nothing_reads_are_freed_at_once():
    made: list[weakref.ref[torch.Tensor]] = []

    def unread() -> torch.Tensor:
        made.append(weakref.ref(found := torch.ones(2)))
        return found

    def is_freed() -> bool:
        return made[0]() is None

    graph = Graph()
    graph.call_function(unread)
    graph.output((graph.call_function(is_freed),))
    assert interpreted(GraphModule(torch.nn.Module(), graph))([]) == (True,)
