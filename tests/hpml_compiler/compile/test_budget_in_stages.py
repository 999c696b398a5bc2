"""A memory budget for a pipelined step -> each stage saves less for backward, with the numbers of the same step without it. The
measured peak is the predicted one, with and without a budget."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpml_compiler
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.runtime.optimizer.resident_memory import local
from hpml_compiler.simulate import simulate
from hpml_compiler.visualize.memory_explanation import memory_json
from passes.errors import Infeasible
from passes.hardware.cluster import Cluster
from tests.helpers.peaks import least_peak
from tests.helpers.plans import plan_of_ranks
from tests.hpml_compiler.compile.test_budget import WIDTH, Deep
from tests.hpml_compiler.compile.test_budget_in_microbatches import COUNTED_WITHIN, Features

ROWS, LAYERS = 2048, 4
BASE: dict[str, Any] = {"compiler": "eager", "microbatches": 4, "mesh": {"pp": 2}}


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin()


def trained(options: dict[str, Any], kind: type[Deep] = Deep, measures: bool = True) -> tuple[list[torch.Tensor], int, int]:
    """Loss and gradients of a step, the peak bytes of later ones, and the most that any rank holds."""
    hpml_compiler.reset()
    model = kind(0.2, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = torch.compile(model, backend="hpml", options=options)
    torch.manual_seed(1)
    x, gradients = batch(), []

    def step() -> torch.Tensor:
        out = call(x)
        loss = out.square().mean() if out.dim() else out
        loss.backward()
        if not gradients:
            gradients.extend(local(p.grad).clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    loss, peak = step(), least_peak(step, model, optimizer) if measures else 0
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return [loss, *gradients], peak, max(peaks)


def kept_in(graph: GraphPlan) -> list[CheckpointingPlan]:
    assert graph.pipeline is not None
    return [stage.kept for stage in graph.pipeline.stages if stage.kept is not None]


def check(options: dict[str, Any], share: float, kind: type[Deep] = Deep, exact: bool = True) -> GraphPlan:
    expected, _, unbounded = trained({name: each for name, each in options.items() if "offload" not in name}, kind)
    check_counted(plan_of_ranks(), unbounded)
    budget = int(share * unbounded)
    numbers, peak, highest = trained(options | {"memory_budget": budget}, kind)
    plan = plan_of_ranks()
    (graph,) = plan.graphs
    assert {each.budget_bytes for each in kept_in(graph)} == {budget} and any(each.again for each in kept_in(graph)), options
    assert peak <= (1.03 if exact else 1.05) * budget, f"{peak / budget:.3f} of the budget, {options}"
    check_counted(plan, highest)
    for ours, theirs in zip(numbers, expected, strict=True):
        assert torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), options
    return graph


def check_counted(plan: Plan, measured: int) -> None:
    """The peak that all reports show is the measured one."""
    assert abs(plan.memory.peak / measured - 1) <= COUNTED_WITHIN, f"{plan.memory.peak / measured:.3f} counted, {plan.options}"
    assert simulate(plan).peak_bytes == plan.memory.peak == memory_json(plan, plan.peak)["peak_bytes"]


def on_schedule(rank: int, schedule: str, virtual: int, share: float) -> None:
    check({**BASE, "schedule": schedule, "virtual_stages": virtual}, share)


@pytest.mark.parametrize(("schedule", "virtual", "share"), [
    ("interleaved", 2, 0.7), ("zero_bubble", 1, 0.88)])
def test_stages_stay_below_a_budget_with_the_same_numbers_bit_for_bit(launch, schedule, virtual, share):
    launch(on_schedule, args=(schedule, virtual, share))


class Long(Deep):
    def __init__(self, dropout: float, layers: int):
        super().__init__(dropout, 3 * layers)


def in_regions(rank: int) -> None:
    graph = check({**BASE, "compile_blocks": "on"}, 0.75, Long)
    assert {report.different < 3 * LAYERS // 2 <= report.segments for report in graph.blocks.values()} == {True}, graph.blocks
    assert "backward" in "".join(graph.blocks)


def test_stages_are_compiled_in_regions_below_a_budget(launch):
    launch(in_regions)


def offloading(rank: int, folder: str) -> None:
    # Without a budget, the loss would become part of the schedule.
    offloaded = check({**BASE, "outputs": "whole", "offload": "saved", "offload_folder": folder}, 0.38, Features)
    assert any(each.offloaded for each in kept_in(offloaded))


def test_saved_values_of_stages_are_offloaded_with_the_loss_outside(launch, tmp_path):
    launch(offloading, args=(str(tmp_path),))


def planned_and_run(rank: int) -> None:
    graph = check(BASE, 0.8)
    check_planned(rank, graph)
    with pytest.raises(Exception, match="the step needs at least"):
        trained({**BASE, "memory_budget": "3MiB"}, measures=False)


def check_planned(rank: int, graph: GraphPlan) -> None:
    """`hpml plan` decides as the run did, and a run obeys the plan."""
    ran, budget = plan_of_ranks(), kept_in(graph)[0].budget_bytes
    trained({"compiler": "eager", "plan": ran}, measures=False)
    again = plan_of_ranks()
    if rank == 0:
        planned = hpml_compiler.plan(Deep(0.2, LAYERS), (batch(),), Cluster.local(2, "cpu"), **BASE, memory_budget=budget)
        assert isinstance(planned, Plan)
        for other in (planned.graphs[0], again.graphs[0]):
            assert (other.pipeline, other.memory) == (graph.pipeline, graph.memory)
        with pytest.raises(Infeasible, match="more than the budget of"):
            hpml_compiler.plan(Deep(0.2, LAYERS), (batch(),), Cluster.local(2, "cpu"), **BASE, memory_budget="3MiB")


def test_a_plan_decides_as_a_run_does_can_be_obeyed_and_refuses_what_nothing_meets(launch):
    launch(planned_and_run)


def on_four_ranks(rank: int) -> None:
    check({**BASE, "mesh": {"pp": 2, "dp": 2}}, 0.85, exact=False)  # sums over ranks are rounded in another order


def test_ranks_that_share_a_stage_recompute_alike(launch):
    launch(on_four_ranks, 4)
