"""A graph -> its callables."""
from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

from hpml_compiler.compile.lower.lowering import interpreted
from tests.hpml_compiler.runtime.common import full


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


class Residual(nn.Module):
    """Backward reads the embedded words as rows of all tokens, for a weight, and as they are, where their sum may overwrite
    them."""

    def __init__(self):
        super().__init__()
        self.words, self.up = nn.Embedding(96, 16), nn.Linear(16, 16)
        self.head, self.norm = nn.Linear(16, 96, bias=False), nn.LayerNorm(16)

    def forward(self, ids):
        x = self.words(ids)
        return F.cross_entropy(self.head(self.norm(x + F.gelu(self.up(x)))).flatten(0, 1), ids.flip(0).flatten())


def with_saved_views(rank: int) -> None:
    torch.manual_seed(0)
    model, ids = Residual().double(), torch.randint(0, 96, (8, 12))
    alone = copy.deepcopy(model)
    alone(ids).backward()
    options: dict[str, Any] = {"mesh": {"dp": 2}}
    torch.compile(model, backend="hpml", options=options)(ids).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-9, atol=1e-12)


def test_a_saved_value_is_not_overwritten_while_a_view_of_it_is_to_be_read(launch):
    launch(with_saved_views, timeout_s=110)
