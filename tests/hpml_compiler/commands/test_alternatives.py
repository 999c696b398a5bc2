"""Alternatives to one decision are solved: the rest of the step stays, and the time is what the other plan predicts."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.commands._alternatives import alternatives_text
from hpml_compiler.demo.train import GPT
from hpml_compiler.visualize.step_explanation import microbatches_of
from tests.helpers.plans import gpt_plan

STAGES = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x).relu()
        return x.square().mean()


def planned(model, batch, **options):
    """A plan, a function that plans again, and what that planned."""
    made = []

    def replan(**changed):
        made.append(hpml_compiler.plan(model, batch, "1x4:a100-80g", **{"costs": "roofline", **options, **changed}))
        return made[-1]

    return replan(), replan, made


@pytest.mark.parametrize(("layers", "options"), [(8, {}), (8, STAGES), (3, {"mesh": {"dp": 4}, "microbatches": 4})],
                         ids=["few layers", "stages", "microbatches"])
def test_each_alternative_is_the_best_plan_with_that_decision(layers, options):
    tokens = torch.zeros(16, 16, dtype=torch.long)
    plan, replan, made = planned(GPT(width=64, heads=2, layers=layers, length=16), (tokens, tokens), **options)
    graph = plan.graphs[0]
    name = next(each for each, parameter in graph.parameters.items() if ".2." in each and len(parameter.shape) == 2)
    assert graph.graph_hash.startswith("shortened:") == (layers == 8)
    text = alternatives_text(plan, name, replan)
    assert made[1:] and text.count(" a step, ") == len(made) - 1
    for found in made[1:]:
        other = found.graphs[0]
        assert other.parameters[name].placements != graph.parameters[name].placements and other.mesh == graph.mesh
        assert microbatches_of(other) == microbatches_of(graph)
        assert (other.pipeline and len(other.pipeline.stages)) == (graph.pipeline and len(graph.pipeline.stages))
        if not options:  # the solver minimizes this very figure
            assert found.predicted.step_time_us >= plan.predicted.step_time_us * (1 - 1e-6)
        assert f"{found.predicted.step_time_us / plan.predicted.step_time_us - 1:+.2%}" in text


@pytest.mark.parametrize(("name", "others"), [
    ("stages", [({"pp": 4}, 2), ({"dp": 4}, 2)]), ("microbatches", [({"pp": 2, "dp": 2}, 4), ({"pp": 2, "dp": 2}, 1)]),
    ("schedule", [({"pp": 2, "dp": 2}, 2)] * 3)])
def test_other_stages_microbatches_and_schedules_are_planned_with_the_rest_as_it_is(name, others):
    plan, replan, made = planned(Layers(), (torch.zeros(32, 64),), **STAGES)
    text = alternatives_text(plan, name, replan)
    assert [(each.mesh, microbatches_of(each.graphs[0])) for each in made[1:]] == others
    assert text.count(" a step, ") == len(others) and name in plan.explain(name)
    if name == "schedule":
        assert [each.graphs[0].pipeline.schedule for each in made[1:]] == ["interleaved", "zero_bubble", "gpipe"]


def test_what_cannot_be_changed_alone_says_why():
    assert "does not record this decision" in alternatives_text(gpt_plan(), "h.0.fc.weight", lambda **_: gpt_plan())
    assert "no other schedule" in alternatives_text(gpt_plan(), "schedule", lambda **_: gpt_plan())
    assert "solved for parameters, and for stages" in alternatives_text(gpt_plan(), "fc_0", lambda **_: gpt_plan())
