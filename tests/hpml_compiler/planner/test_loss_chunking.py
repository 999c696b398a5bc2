"""The plan of a step says in how many chunks its loss is computed, or why in none."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.visualize.plan_table import PlanTable
from hpml_compiler.visualize.terminal import as_text
from tests.helpers import heads
from tests.helpers.heads import Headed, batch, make
from tests.passes.op_rules.families.zoo import MODELS

PAIR = "1x2:h100-80g"


def planned(model: torch.nn.Module, cluster: str | None = None, **options: Any) -> Plan:
    torch.compiler.reset()
    found = hpml_compiler.plan(model, batch(), cluster, compiler="eager", **options)
    assert isinstance(found, Plan) and Plan.from_json(found.to_json()) == found
    return found


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    for name, size in {"WIDTH": 16, "WORDS": 4096, "TOKENS": 24}.items():  # else logits are gathered, which takes no time
        monkeypatch.setattr(heads, name, size)


def test_a_step_whose_microbatches_were_refused_is_looked_at_as_it_was_decided():
    plan = hpml_compiler.plan(*MODELS["mixtral"](), "1x4:a100-80g", mesh={"dp": 2, "tp": 2}, microbatches=2)
    assert isinstance(plan, Plan) and plan.graphs[0].microbatches is None and plan.graphs[0].loss_chunks is not None


@pytest.mark.parametrize("cluster, options", [
    (None, {}), (None, {"memory_budget": "1GiB"}), (PAIR, {"mesh": {"dp": 2}}), (PAIR, {"mesh": {"dp": 2}, "microbatches": 2}),
    (PAIR, {"mesh": {"dp": 2}, "memory_budget": "1GiB"})])
def test_number_of_chunks(cluster, options):
    plan = planned(make("bias"), cluster, loss_chunks=4, **options)
    chunks = plan.graphs[0].loss_chunks
    assert chunks is not None and (chunks.count, chunks.reason) == (4, "")
    assert "in 4 chunks of rows" in as_text(PlanTable(plan))


def test_explanation():
    plan = planned(make("bias"), loss_chunks=4)
    said = "the loss is computed in 4 chunks of rows"
    assert said in plan.explain("head.weight") and said not in plan.explain("body.weight")


def sorting() -> Headed:
    return Headed(lambda m, h, y: m.head(h).flatten().sort().values[:5].sum()).double()


@pytest.mark.parametrize("cluster, options", [(None, {}), (PAIR, {"mesh": {"dp": 2}})])
def test_reason_for_none(cluster, options):
    plan = planned(sorting(), cluster, loss_chunks=8, **options)
    table = " ".join(as_text(PlanTable(plan)).split())
    assert "at once: rows depend on each other at sort" in table


def test_a_reason_that_nobody_asked_for_is_only_explained():
    plan = planned(sorting())
    assert "at once" not in as_text(PlanTable(plan))
    assert any("the loss is computed at once: " in plan.explain(name) for name in plan.graphs[0].operations)
