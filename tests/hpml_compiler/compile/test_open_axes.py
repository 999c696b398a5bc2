"""Graphs that get no microbatches and stages, and meshes that nothing completes -> a log line or the error says why."""
from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.alone import rank_0_of
from tests.hpml_compiler.compile.test_open_graph import EAGER, GPT, batch

SMALL, ENOUGH = 20_000, 200_000
"""Budgets: of a batch of four rows, and enough for it."""


class Broken(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        torch._dynamo.graph_break()
        return self.loss(self.head(self.layers[0](x)), tokens)


@pytest.mark.parametrize(("kind", "options", "rows", "why"), [
    (Broken, {"memory_budget": SMALL}, (4,), "Dynamo breaks it"),
    (Broken, {"mesh": {"tp": 1}}, (4,), "has 1 of 2 ranks: the step is several graphs, since Dynamo breaks it"),
    (GPT, {"memory_budget": ENOUGH}, (4, 256), "has decided for these parameters"),
])
def test_the_reason_is_told(kind: type[GPT], options: dict[str, Any], rows: tuple[int, ...], why: str, caplog):
    with rank_0_of(2), caplog.at_level(logging.WARNING, "hpml"), pytest.raises(Exception) as caught:
        call = torch.compile(kind(12, 1), backend="hpml", options={**EAGER, "optimizer": "sgd", **options})
        for number in rows:
            call(batch(number, 8))
    assert re.search(why, "\n".join([*caplog.messages, str(caught.value)])), caplog.messages
