"""Nothing pinned and a step that does not fit -> a plan that fits, or an error with the least memory."""
from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.options import Options
from hpml_compiler.planner.joint.open_decisions import JointCandidate, OpenDecisions, StageCost
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from tests.hpml_compiler.planner.test_offline_budget import EAGER
from tests.passes.traced import transformer


class Head(nn.Module):
    """Its logits are its peak."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.tokens(tokens)).flatten(0, 1), tokens.flatten())


TOKENS = torch.arange(8 * 64).view(8, 64)
DEEP = functools.cache(lambda: transformer(512, 64, 4, 10, rows=8, length=64))


def cluster_of(nbytes: int, devices: int = 2) -> Cluster:
    made = Cluster.parse(f"1x{devices}:h100-80g")
    return Cluster((replace(made.group, device=replace(made.device, memory_bytes=nbytes)),))


def planned(nbytes: int, model=None, batch=None, devices: int = 2, **options):
    if model is None:
        model, batch = DEEP()
    return hpml_compiler.plan(model, batch, cluster=cluster_of(nbytes, devices), **EAGER, **options)


@functools.cache
def roomy() -> int:
    """Bytes of a device that has room for everything."""
    return planned(10**11).peak.bytes


def test_a_step_that_does_not_fit_is_planned_so_that_it_does():
    limit = int(0.6 * roomy())
    plan = planned(limit, mesh={"dp": 2})
    (graph,) = plan.graphs
    assert graph.memory.peak == plan.peak.bytes <= limit
    assert graph.microbatches is not None or graph.kept.again or graph.pipeline is not None
    assert graph.solver.bound <= graph.predicted.step_time_us == graph.solver.cost
    assert graph.solver.gap == pytest.approx(1 - graph.solver.bound / graph.solver.cost)
    assert (graph.solver.status == "optimal") == (graph.solver.gap <= 1e-3)
    assert all(each.bound is None or each.bound >= graph.solver.bound for each in plan.rejected)
    assert all(each.cost is None or each.cost >= graph.solver.cost for each in plan.rejected)


@pytest.mark.parametrize("part", [0.9, 0.75, 0.6])
def test_logits_that_are_the_peak_go_through_in_microbatches(part):
    limit = int(part * planned(10**11, Head(), (TOKENS,)).peak.bytes)
    assert planned(10**11, Head(), (TOKENS,), memory_budget=limit).peak.bytes <= limit


def test_what_fits_is_planned_as_before():
    model, batch = DEEP()
    plan = hpml_compiler.plan(model, batch, cluster="1x2:h100-80g", **EAGER)
    (graph,) = plan.graphs
    assert graph.microbatches is None and graph.kept is None and graph.pipeline is None


def test_pins_stay_and_the_rest_is_decided():
    limit = int(0.6 * roomy())
    plan = planned(limit, mesh={"dp": 2}, microbatches=4)
    assert plan.mesh == {"dp": 2} and plan.graphs[0].microbatches.count == 4 and plan.peak.bytes <= limit


def test_where_nothing_fits_the_least_memory_is_told():
    with pytest.raises(Infeasible) as caught:
        planned(roomy() // 30)
    error = caught.value
    assert error.exit_code == 3 and "no configuration of mesh, stages, microbatches and recomputation was found" in error.what
    assert error.smallest_budget_bytes > roomy() // 30 and error.next_step


def test_decisions_that_are_open():
    def of(rows: int = 8, **options) -> OpenDecisions:
        return OpenDecisions(Options.parse(options), Cluster.parse("2x4:a100-80g"), rows)

    assert of().any and not of(microbatches=2, recompute={"*": "full"}).any and not of(objective="energy").any
    assert list(of().stage_counts()) == [1, 2, 4] and list(of(mesh={"pp": 2, "dp": 4}).stage_counts()) == [2]
    assert of().stage_meshes(2) == [{"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 4}]
    assert of(rows=6).stage_meshes(1) == [{"dp": 2, "tp": 4}], "rows are split evenly"
    assert of().microbatch_counts({"dp": 2, "tp": 4}) == [1, 2, 4] and of(microbatches=3).microbatch_counts({}) == [3]


def test_more_microbatches_take_fewer_bytes_and_stages_a_bubble():
    cost = StageCost({"dp": 2}, 100.0, 90.0, 10.0, 1000.0, 20.0, 5.0)
    one, four, staged = (JointCandidate(*each, 500.0) for each in ((1, cost, 1), (1, cost, 4), (2, cost, 4)))
    assert four.bytes_with(1.0) < one.bytes_with(1.0) and four.us < one.us, "which recomputes more"
    assert staged.mesh == {"pp": 2, "dp": 2} and staged.bound_us == 45.0 <= staged.us
    assert str(one) == "the whole batch at once" and str(staged) == "2 stages in 4 microbatches"
