"""Alternatives to one decision are solved: the parameter is stored so, and the step is what that plan predicts."""
from __future__ import annotations

import torch
from torch import nn

import hpml_compiler
from hpml_compiler.commands._alternatives import alternatives_text
from tests.helpers.plans import gpt_plan


def test_each_alternative_is_the_best_plan_with_that_decision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    batch, options = (torch.randn(32, 64),), {"costs": "roofline"}
    plan = hpml_compiler.plan(model, batch, "1x4:a100-80g", **options)
    made = []

    def replan(edited):
        made.append(hpml_compiler.plan(model, batch, "1x4:a100-80g", plan=edited, **options))
        return made[-1]

    text = alternatives_text(plan, "0.weight", replan)
    stored = plan.graphs[0].parameters["0.weight"].placements
    others = [found.graphs[0].parameters["0.weight"].placements for found in made]
    assert sorted({stored, *others}) == [("R",), ("S(0)",), ("S(1)",)] and len(others) == 2
    for found in made:
        assert found.predicted.step_time_us >= plan.predicted.step_time_us * (1 - 1e-6)
        assert f"{found.predicted.step_time_us / plan.predicted.step_time_us - 1:+.2%}" in text


def test_what_cannot_be_changed_alone_says_why():
    assert "does not record this decision" in alternatives_text(gpt_plan(), "h.0.fc.weight", lambda plan: plan)
    graph = gpt_plan().graphs[0].model_copy(update={"graph_hash": "shortened:abc"})
    short = gpt_plan().model_copy(update={"graphs": (graph,)})
    assert "layers that it did not trace" in alternatives_text(short, "h.0.fc.weight", lambda plan: plan)
