"""The plan with nothing pinned against a grid with everything pinned, under one simulator; one JSON object.

    python benchmarks/hand_tuned.py big_models.py:gpt3_175b --cluster 128x8:a100-80g --most 40

The grid is stages x tensor x data x microbatches x schedule x recompute x ZeRO, each point planned on its own. Points are
planned in the order of their estimates; those that a lower bound rules out are not, and neither are those after `--most`.
`ratio`: step time of the unpinned plan, simulated with overlap, over the best of the points that fit; `objective_ratio`:
without overlap. Every point that does not fit, or that is refused, is listed with its message.
"""
from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpml_compiler.cli_target import load_target
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.joint.joint_candidate import JointCandidate
from hpml_compiler.planner.joint.joint_search import JointSearch
from hpml_compiler.planner.joint.open_planner import joint_search_of, plan_open
from hpml_compiler.planner.offline_planner import plan_candidate
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.simulate.simulator import simulate
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.solver.work_limit import WorkLimit

RECOMPUTE, ZERO = ("none", "selective", "full"), (0, 2, 3)


@dataclass(frozen=True)
class PinnedPoint:
    """recompute, zero: values of these options."""

    candidate: JointCandidate
    recompute: str
    zero: int

    def options(self, options: Options) -> Options:
        pinned = self.candidate.options(options.model_copy(update={"recompute": {"*": self.recompute}}))
        return pinned.model_copy(update={"zero": self.zero})

    def __str__(self) -> str:
        axes = " ".join(f"{name}{size}" for name, size in self.candidate.mesh.items())
        how = f"m{self.candidate.microbatches} {self.candidate.schedule.name}"
        return f"{axes} {how} recompute={self.recompute} zero={self.zero}"


@dataclass
class PinnedGrid:
    """found: simulated µs, µs without overlap, and the point. refused: point -> message."""

    traces: TracedModel
    cluster: Cluster
    found: list[tuple[float, float, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    planned: int = 0
    ruled_out: int = 0

    def run(self, points: Iterator[PinnedPoint], most: int) -> None:
        for point in points:
            if self.found and point.candidate.bound_us >= min(self.found)[0]:
                self.ruled_out += 1
            elif self.planned < most:
                self.planned += 1
                self._plan(point)

    def _plan(self, point: PinnedPoint) -> None:
        options = point.options(self.traces.options)
        try:
            plan = plan_candidate(self.traces.with_options(options), self.cluster, WorkLimit(options.time_limit))
        except (Infeasible, BadInput) as error:
            self.refused[str(point)] = error.what
        except (DepthsDiffer, LayersDiffer) as error:
            self.refused[str(point)] = f"a few layers do not represent the model: {error}"
        else:
            if plan.memory.peak > self.cluster.device.memory_bytes:
                self.refused[str(point)] = f"it takes {plan.memory.peak} bytes"
            else:
                self.found.append((simulate(plan).step_us, plan.predicted.step_time_us, str(point)))


def points_of(search: JointSearch) -> Iterator[PinnedPoint]:
    for candidate, recompute, zero in itertools.product(search.candidates(), RECOMPUTE, ZERO):
        if zero == 0 or candidate.cost.mesh.get("dp", 1) > 1:
            yield PinnedPoint(candidate, recompute, zero)


def figures(plan: Plan, grid: PinnedGrid, seconds: dict[str, float]) -> dict[str, Any]:
    ours, best = simulate(plan).step_us, min(grid.found, default=None)
    return {
        "benchmark": "hand_tuned", "planned": grid.planned, "ruled_out": grid.ruled_out, "fit": len(grid.found),
        "refused": grid.refused, **seconds,
        "unpinned": {"simulated_s": 1e-6 * ours, "objective_s": 1e-6 * plan.predicted.step_time_us, "mesh": dict(plan.mesh),
                     "peak_bytes": plan.memory.peak},
        "best": None if best is None else {"simulated_s": 1e-6 * best[0], "objective_s": 1e-6 * best[1], "point": best[2]},
        "ratio": None if best is None else ours / best[0],
        "objective_ratio": None if best is None else plan.predicted.step_time_us / min(us for _, us, _ in grid.found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--cluster", default="4x8:a100-40g")
    parser.add_argument("--most", type=int, default=40, help="points to plan")
    args = parser.parse_args()
    model, batch = load_target(args.target)
    cluster, traces = Cluster.parse(args.cluster), TracedModel(model, batch, Options.parse({}), known={})
    start = time.process_time()
    plan = plan_open(traces, cluster)
    own = time.process_time()
    grid = PinnedGrid(traces, cluster)
    search = joint_search_of(traces, cluster)
    if search is not None:
        grid.run(points_of(search), args.most)
    print(json.dumps({"target": args.target, "cluster": args.cluster, **figures(plan, grid, {
        "unpinned_cpu_s": own - start, "grid_cpu_s": time.process_time() - own})}))


if __name__ == "__main__":
    main()
