"""Alternatives to one decision are solved: the rest of the step stays, and the time is what the other plan predicts."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.commands._alternatives import alternatives_text
from hpml_compiler.commands._value_pins import why_not_alone
from hpml_compiler.demo.train import GPT
from hpml_compiler.visualize.formatting import format_placements
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


def gpt():
    tokens = torch.zeros(16, 16, dtype=torch.long)
    return GPT(width=64, heads=2, layers=8, length=16), (tokens, tokens)


def layers():
    return Layers(), (torch.zeros(32, 64),)


@pytest.mark.parametrize(("make", "options"), [(gpt, {}), (layers, STAGES), (layers, {"mesh": {"dp": 4}, "microbatches": 4})],
                         ids=["few layers", "stages", "microbatches"])
def test_each_alternative_is_the_best_plan_with_that_decision(make, options):
    plan, replan, made = planned(*make(), **options)
    graph = plan.graphs[0]
    name = next(each for each, parameter in graph.parameters.items() if ".2." in each and len(parameter.shape) == 2)
    assert graph.graph_hash.startswith("shortened:") == (make is gpt)
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


@pytest.mark.parametrize("options", [{"mesh": {"x": 4}}, {**STAGES, "mesh": {"pp": 2, "x": 2}}], ids=["one axis", "stages"])
def test_a_value_is_made_in_another_placement(options):
    plan, replan, made = planned(*layers(), **options)
    graph = plan.graphs[0]
    alone = {name: why_not_alone(graph, name) for name, each in graph.operations.items() if not each.backward}
    name = next(name for name, why in alone.items() if not why and graph.operations[name].kind == "matmul")
    text = alternatives_text(plan, name, replan)
    assert len(made) > 1 and text.count(" a step, ") == len(made) - 1, text
    for found in made[1:]:
        other = found.graphs[0]
        before, after = (each.operations[name].outputs[0] for each in (graph, other))
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1 and other.mesh == graph.mesh, "on one axis"
        assert format_placements(after, graph.mesh) in text
        if "pp" not in other.mesh:
            assert found.predicted.step_time_us >= plan.predicted.step_time_us * (1 - 1e-6)
    inside = next(name for name, why in alone.items() if "inside of a kernel" in why)
    assert f"{inside} is inside of a kernel, whose results are placed; ask for " in alternatives_text(plan, inside, replan)


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
    assert "does not record this decision" in alternatives_text(gpt_plan(), "fc_0", lambda **_: gpt_plan())
