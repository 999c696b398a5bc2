"""A memory budget for a step in microbatches -> each saves less for backward, with the numbers of the same step without it."""
from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.simulate import simulate
from tests.helpers.frozen import fresh
from tests.helpers.peaks import least_peak
from tests.helpers.plans import plan_of_ranks
from tests.hpml_compiler.compile.test_budget import ROWS, WIDTH, Deep, trained

COUNTED_WITHIN = 0.05
"""How far the predicted peak may be from the measured one."""


class Features(Deep):
    """With the loss outside, so that forward of all microbatches runs before backward of the first."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def check(options: dict[str, Any], kind: type[Deep], dropout: float, share: float) -> None:
    options = options | {"outputs": "whole"}  # the loss stays outside
    expected, unbounded = trained(options, dropout, kind)
    budget = int(share * unbounded)
    numbers, peak = trained(options | {"memory_budget": budget}, dropout, kind)
    plan = hpml_compiler.last_plan()
    (graph,) = plan.graphs
    assert graph.microbatches is not None and graph.microbatches.count == options["microbatches"]
    assert graph.kept is not None and graph.kept.again
    assert peak <= 1.03 * budget, f"{peak / budget:.3f} of the budget"
    assert abs(plan.peak.bytes / peak - 1) <= COUNTED_WITHIN
    for ours, theirs in zip(numbers, expected, strict=True):
        if options["compiler"] == "eager":
            assert torch.equal(ours, theirs)
        else:  # other kernels are fused
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "microbatches", "share"), [(Deep, 2, 0.8), (Features, 4, 0.7)])
def test_a_step_stays_below_its_budget_with_the_same_numbers_bit_for_bit(kind, microbatches, share):
    check({"compiler": "eager", "microbatches": microbatches}, kind, 0.2, share)


def test_inductor_holds_what_was_counted():
    check({"compiler": "inductor", "microbatches": 2}, Deep, 0.0, 0.85)


def test_saved_values_are_offloaded(tmp_path):
    options = {"compiler": "eager", "microbatches": 2, "outputs": "whole"}
    expected, unbounded = trained(options, 0.2, Features)
    numbers, peak = trained(options | {"memory_budget": int(0.55 * unbounded), "offload": "saved",
                                       "offload_folder": str(tmp_path)}, 0.2, Features)
    (graph,) = hpml_compiler.last_plan().graphs
    assert graph.kept is not None and graph.kept.offloaded
    assert peak <= 1.03 * 0.55 * unbounded and all(map(torch.equal, numbers, expected))


def test_a_budget_that_nothing_meets_is_refused_with_one_that_works():
    options = {"compiler": "eager", "microbatches": 4, "outputs": "whole"}
    with pytest.raises(Exception, match="the step needs at least") as caught:
        trained(options | {"memory_budget": "2MiB"}, 0.0, Deep)
    found = re.search(r"memory_budget to (\d+) bytes", str(caught.value))
    assert found is not None
    least = int(found[1])
    _, peak = trained(options | {"memory_budget": least}, 0.0, Deep)
    assert peak <= 1.03 * least


def decided(plan: Plan) -> tuple[list[str], list[str], int]:
    """What is saved and recomputed, and the bytes saved."""
    kept = plan.graphs[0].kept
    assert kept is not None
    return sorted(kept.saved), sorted(kept.again), kept.saved_bytes


def test_a_plan_decides_as_a_run_does_and_can_be_obeyed():
    options = {"compiler": "eager", "microbatches": 4, "outputs": "whole"}
    model, x = Features(0.0), torch.randn(ROWS, WIDTH)
    free = hpml_compiler.plan(model, (x,), "1x1:cpu", **options)
    plan = hpml_compiler.plan(model, (x,), "1x1:cpu", memory_budget=int(0.8 * free.peak.bytes), **options)
    budget = plan.graphs[0].kept.budget_bytes
    trained(options | {"memory_budget": budget, "cluster": "1x1:cpu"}, 0.0, Features)
    run = hpml_compiler.last_plan()
    assert decided(run) == decided(plan) and run.peak == plan.peak
    assert simulate(plan).peak_bytes == plan.peak.bytes
    trained({"compiler": "eager", "plan": plan}, 0.0, Features)
    assert decided(hpml_compiler.last_plan()) == decided(plan)


class Centered(Deep):
    """Rows depend on each other, so that the step is not split into microbatches."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_a_plan_of_a_step_that_is_not_split_can_be_obeyed():
    options = {"compiler": "eager", "microbatches": 4, "outputs": "whole"}
    expected, _ = trained(options | {"memory_budget": "64MiB"}, 0.0, Centered)
    plan = hpml_compiler.last_plan()
    assert plan.graphs[0].microbatches is None
    numbers, _ = trained(options | {"plan": plan}, 0.0, Centered)
    assert decided(hpml_compiler.last_plan()) == decided(plan) and all(map(torch.equal, numbers, expected))


def test_a_few_layers_stand_for_all():
    model, batch, peaks = Features(0.0, layers=10), (torch.randn(ROWS, WIDTH),), []
    for every in (False, True):
        plan = hpml_compiler.plan(model, batch, "1x1:a100-80g", microbatches=4, memory_budget="9MiB", trace_all_layers=every)
        assert plan.graphs[0].kept is not None and plan.graphs[0].kept.again
        peaks.append(plan.peak.bytes)
    assert peaks[0] <= 9 * 2**20 and abs(peaks[0] / peaks[1] - 1) <= 0.05


def on_two_ranks(rank: int, cases: list[dict[str, Any]]) -> list[tuple[list[torch.Tensor], int, int]]:
    return [on_each_rank(options) for options in cases]


def on_each_rank(options: dict[str, Any]) -> tuple[list[torch.Tensor], int, int]:
    """Losses, measured peak, and how many operations are recomputed."""
    fresh()
    model = Deep(0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "microbatches": 2, **options})
    torch.manual_seed(1)
    x, losses = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin(), []

    def step() -> None:
        loss = call(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())

    step()
    step()
    peak, kept = least_peak(step, model, optimizer), plan_of_ranks().graphs[0].kept
    return losses, peak, 0 if kept is None else len(kept.again)


def test_ranks_recompute_in_their_loops(launch):
    meshes: list[dict[str, Any]] = [{"mesh": {"dp": 2}}, {"mesh": {"tp": 2}}, {"mesh": {"dp": 2}, "zero": 3}]
    without = launch(on_two_ranks, args=(meshes,))[0]
    shares = (0.9, 0.9, 0.95)
    budgets = [int(share * peak) for share, (_, peak, _) in zip(shares, without, strict=True)]
    below = launch(on_two_ranks, args=([mesh | {"memory_budget": budget} for mesh, budget in zip(meshes, budgets)],))[0]
    for case, (expected, _, none), (losses, peak, recomputed), budget in zip(meshes, without, below, budgets, strict=True):
        assert recomputed > none == 0
        assert peak <= 1.05 * budget, f"{peak / budget:.3f} of the budget, {case}"
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)
