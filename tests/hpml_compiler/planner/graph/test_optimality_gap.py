"""A byte budget -> a lower bound for every plan within it: random plans, each with every checkpointing choice."""
from __future__ import annotations

import math
import random

import torch
from torch import nn

from hpml_compiler.options import Options
from hpml_compiler.planner.decide import OfflineRanks, decide
from hpml_compiler.planner.graph.graph_planning import plan_graph
from hpml_compiler.planner.offline_planner import OfflinePlanner
from hpml_compiler.planner.search.dry_run import DryRun
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.plans.schema import DecisionRecord
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.oracle.memory_model import MemoryModel
from passes.solver.work_limit import WorkLimit
from tests.passes.checkpointing.test_checkpoint_search import every_walk

CLUSTER = Cluster.parse("1x2:cpu")
PLANS = 12
FREE = {"compiler": "eager", "costs": "roofline", "memory_budget": "1GiB", "mesh": {"x": 2}}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).sum()


def least_us(trial, planned) -> float:
    """The least time of a step with these placements, over all that may be kept."""
    program, share = read(STORAGE_PROGRAM, trial.problem(planned).gm), trial.sharing.share_of(trial.memory(planned))
    fitting = (sum(program.runs[k].us for k in each.recomputed) for each in every_walk(program)
               if max(each.peak, each.after + share.after) <= share.available)
    predicted = planned.record.predicted
    return predicted.step_time_us - predicted.overhead_us + min(fitting, default=math.inf)


def choices(annotated) -> dict[str, list]:
    """What each entity of the problem may choose."""
    prices = MeshPrices(mesh_from_pin({"x": 2}, CLUSTER), 2)
    drafts = PlacementProblem(annotated.graph, prices.mesh.layout_axes, prices).entities.drafts
    return {draft.name: [(each.choice.inputs, each.choice.outputs) for each in draft.options] for draft in drafts}


def pinned(annotated, options: Options, record, names: list[str]):
    """The cheapest plan in which these entities chose at random; what does not go together is searched for."""
    chosen = {name: random.choice(ways) for name, ways in choices(annotated).items() if name in names}
    decisions = {name: DecisionRecord(inputs=inputs, outputs=outputs) for name, (inputs, outputs) in chosen.items()}
    return plan_graph(annotated, options, CLUSTER, like=record.model_copy(update={"decisions": decisions}),
                      lifetimes=MemoryModel(0.0), budget_bytes=2.0**40)


def test_no_plan_within_the_budget_is_faster_than_the_bound():
    traces = TracedModel(Small(), (torch.zeros(256, 64),), Options.parse(FREE))
    (annotated,), (traced,) = traces.whole, traces.traced
    free = OfflinePlanner(traces.options, CLUSTER, traces.trained)
    free = free.record(free.problem("free", traced, annotated, WorkLimit(30)))
    random.seed(0)
    for share in (0.95, 0.8):
        options = Options.parse({**FREE, "memory_budget": int(share * free.memory.peak)})
        step = OfflinePlanner(options, CLUSTER, traces.trained).problem("graph", traced, annotated, WorkLimit(30))
        found = decide(step, OfflineRanks(2)).planned
        bound, cost = found.record.solver.bound, found.record.solver.cost
        assert bound is not None and cost is not None and bound <= cost
        trial = DryRun(step)
        times = [least_us(trial, found)]
        for _ in range(PLANS):
            names = random.sample(["mm", "mm_1", "mm_2", "mm_4", "primals_1", "primals_3"], 3)
            times.append(least_us(trial, pinned(annotated, options, free, names)))
        assert bound <= min(times) * (1 + 1e-9) and min(times) < math.inf and len(set(times)) > 3
