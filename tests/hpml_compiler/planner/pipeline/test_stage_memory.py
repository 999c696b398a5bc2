"""Memory of a rank around the loop of a pipeline, as planned."""
from __future__ import annotations

import torch

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from tests.hpml_compiler.compile.test_budget import WIDTH, Deep

ROWS = 4096


def test_each_rank_draws_the_masks_of_all_stages_and_holds_them():
    options = {"mesh": {"pp": 2}, "microbatches": 32, "compiler": "eager"}
    plan = hpml_compiler.plan(Deep(0.2, 4), (torch.zeros(ROWS, WIDTH),), "1x2:cpu", **options)
    assert isinstance(plan, Plan) and plan.graphs[0].pipeline is not None
    kept = [stage.kept for stage in plan.graphs[0].pipeline.stages if stage.kept is not None]
    mask = ROWS * WIDTH
    drawing = mask * (1 + 3 * 4)  # with ones, their dropout and the mask in float32
    forward = [each.forward for each in kept]
    assert [(each.node, sum(each.parts.values())) for each in forward] == [("before forward", drawing + 3 * mask)] * 2
