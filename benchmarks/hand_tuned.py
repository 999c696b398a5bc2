"""The plan with nothing pinned against a grid with everything pinned, under one simulator; one JSON object.

    python benchmarks/hand_tuned.py benchmarks/tuned_models.py:llama_8b --cluster 2x8:l4-24g --most 20
    python benchmarks/hand_tuned.py all --seconds 200        # the targets of tuned_models.py, one line each

The grid is stages x tensor x data x microbatches x schedule x recompute x ZeRO, each point planned on its own, in the order of
estimates; where two points of a mesh and recomputation did not fit, others of it come last. Not planned are points that a lower
bound shows to be slower than the best so far: the bound of the search, and the layers' forward once more where everything is
recomputed; points whose parameters, or saved values if all ranks of a stage share them evenly, do not fit; and those after
`--most` or `--seconds`, which are counted as `left`.
`ratio`: step time of the unpinned plan, simulated with overlap, over the best of the points that fit; `objective_ratio`:
without overlap; `schedules`: time of the played schedule over (m - 1) * slowest rank + sum of stages, least and largest.
"""
from __future__ import annotations

import argparse
import itertools
import json
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpml_compiler.cli_target import load_target
from hpml_compiler.options import Options
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.planner.joint.joint_candidate import JointCandidate
from hpml_compiler.planner.joint.joint_search import JointSearch
from hpml_compiler.planner.joint.open_decisions import WITHOUT_STAGES, OpenDecisions, OpenSchedule
from hpml_compiler.planner.joint.open_planner import joint_search_of, plan_open
from hpml_compiler.planner.offline_planner import plan_candidate
from hpml_compiler.planner.traced_model import TracedModel
from hpml_compiler.simulate.simulator import simulate
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.errors import BadInput, Infeasible
from passes.hardware.cluster import Cluster
from passes.sharding.formulation.depth_extrapolation import DepthsDiffer
from passes.solver.work_limit import WorkLimit

TARGETS = (("gpt_13b", "4x8:a100-40g"), ("gpt_13b", "8x8:l4-24g"), ("llama_8b", "1x8:a100-40g"), ("llama_8b", "2x8:l4-24g"),
           ("t5_11b", "2x8:a100-40g"), ("t5_11b", "4x8:l4-24g"), ("vit_huge", "1x8:a100-40g"), ("vit_huge", "1x8:l4-24g"),
           ("mixtral_8x7b", "8x8:a100-80g"), ("mixtral_8x7b", "8x8:h100-80g"), ("gpt3_175b", "128x8:a100-80g"),
           ("gpt3_175b", "16x8:a100-80g"))
"""Six models of `tuned_models.py`, on two clusters each."""
RECOMPUTE, ZERO = ("none", "selective", "full"), (0, 2, 3)
SCHEDULES = (OpenSchedule("gpipe"), OpenSchedule("1f1b"), OpenSchedule("interleaved", 2, 0.5, 1.5),
             OpenSchedule("interleaved", 4, 0.25, 1.75), OpenSchedule("zero_bubble", 1, 0.4, 1.1),
             OpenSchedule("zbv", 2, 0.2, 1.0))
LEAST_AGAIN = 0.6
"""Part of the layers' forward that is computed again at least where blocks save their inputs alone: their last products are
not."""
MISSES = 2
"""Points of a mesh and recomputation that do not fit, after which others of it come last."""
KEPT = {"none": 1.0, "selective": 0.7, "full": 0.1}
"""Rough part of the saved bytes that remains: for the order of the points alone."""


@dataclass(frozen=True)
class PinnedPoint:
    """recompute, zero: values of these options."""

    candidate: JointCandidate
    recompute: str
    zero: int

    @property
    def bound_us(self) -> float:
        """No plan of this point takes less."""
        candidate = self.candidate
        if self.recompute != "full" or not candidate.least.layers:
            return candidate.bound_us
        cost, least = candidate.cost, candidate.least
        again, all_again = (LEAST_AGAIN * least.forward_share * each for each in (least.layers_us, cost.layers_us))
        more = replace(least, us=least.us + again, layers_us=least.layers_us + again)
        return replace(candidate, least=more, cost=replace(
            cost, bound_us=cost.bound_us + candidate.stages * again, compute_us=cost.compute_us + all_again,
            layers_us=cost.layers_us + all_again)).bound_us

    @property
    def least_bytes(self) -> float:
        """Bytes of a rank if all of a stage share parameters, their state and what the schedule has in flight evenly."""
        candidate, cost = self.candidate, self.candidate.cost
        saved = min(candidate.stages / candidate.microbatches, 1.0) * cost.saved_bytes / candidate.stages
        return cost.state_bytes / candidate.stages + (0.5 * saved if self.recompute == "none" else 0.0)

    @property
    def family(self) -> Hashable:
        return tuple(self.candidate.mesh.items()), self.recompute

    @property
    def us(self) -> float:
        """Estimated time; with what does not fit last."""
        candidate = self.candidate
        bubble = candidate.schedule.bubble * (candidate.stages - 1) / candidate.microbatches
        work = candidate.cost.us / candidate.stages * (1 + bubble)
        forward = candidate.least.forward_share * candidate.cost.layers_us / candidate.stages
        fits = candidate.bytes_with(KEPT[self.recompute]) <= candidate.limit
        return work + forward * {"none": 0.0, "selective": 0.1, "full": 1.0}[self.recompute] + (0.0 if fits else 10 * work)

    def options(self, options: Options) -> Options:
        pinned = self.candidate.options(options.model_copy(update={"recompute": {"*": self.recompute}}))
        return pinned.model_copy(update={"zero": self.zero})

    def __str__(self) -> str:
        axes = " ".join(f"{name}{size}" for name, size in self.candidate.mesh.items())
        how = f" {self.candidate.schedule.name} v{self.candidate.schedule.virtual_stages}" if self.candidate.stages > 1 else ""
        return f"{axes} m{self.candidate.microbatches}{how} recompute={self.recompute} zero={self.zero}"


@dataclass
class PinnedGrid:
    """found: simulated µs, µs without overlap, the point and its plan. refused: point -> message. broken: the same for errors
    that no user should see. left: points that are neither planned nor ruled out. misses: number of points that do not fit, less
    those that do, by mesh and recomputation."""

    traces: TracedModel
    cluster: Cluster
    found: list[tuple[float, float, str]] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    misses: Counter[Hashable] = field(default_factory=Counter)

    def run(self, points: list[PinnedPoint], ours_us: float, most: int, seconds: float) -> None:
        """ours_us: simulated step of the unpinned plan; points that are slower by their bound cannot beat it."""
        start, limit = time.process_time(), self.cluster.device.memory_bytes
        waiting, later = deque(sorted(points, key=lambda each: (each.us, str(each)))), deque[PinnedPoint]()
        while waiting or later:
            point = waiting.popleft() if waiting else later.popleft()
            if waiting and self.misses[point.family] >= MISSES:
                later.append(point)
            elif point.bound_us >= min([ours_us, *(us for us, _, _ in self.found)]):
                self.counts["slower"] += 1
            elif point.least_bytes > limit:
                self.counts["too_large"] += 1
            elif self.counts["planned"] >= most or time.process_time() - start > seconds:
                self.counts["left"] += 1
            else:
                self.counts["planned"] += 1
                self._plan(point)

    def _plan(self, point: PinnedPoint) -> None:
        options = point.options(self.traces.options)
        self.misses[point.family] += 1
        try:
            plan = plan_candidate(self.traces.with_options(options), self.cluster, WorkLimit(options.time_limit))
        except (Infeasible, BadInput) as error:
            self.refused[str(point)] = error.what
        except (DepthsDiffer, LayersDiffer) as error:
            self.refused[str(point)] = f"a few layers do not represent the model: {error}"
        except Exception:
            self.broken[str(point)] = traceback.format_exc(limit=-3)
        else:
            self.misses[point.family] -= 1
            if plan.memory.peak > self.cluster.device.memory_bytes:
                self.broken[str(point)] = f"it takes {plan.memory.peak} bytes"
            self.plans[str(point)] = plan
            self.found.append((simulate(plan).step_us, plan.predicted.step_time_us, str(point)))

    @property
    def schedules(self) -> dict[str, tuple[float, float]]:
        """Least and largest time of the played schedule over the closed form, by schedule."""
        ratios = defaultdict[str, list[float]](list)
        for plan in self.plans.values():
            for pipe in (graph.pipeline for graph in plan.graphs if graph.pipeline is not None):
                each = [stage.forward_us + stage.backward_us for stage in pipe.stages]
                ranks = [sum(us for us, stage in zip(each, pipe.stages) if stage.rank == rank) for rank in range(pipe.ranks)]
                ratios[pipe.schedule].append(pipe.step_us / ((pipe.microbatches - 1) * max(ranks) + sum(each)))
        return {name: (min(found), max(found)) for name, found in ratios.items()}


def points_of(search: JointSearch) -> Iterator[PinnedPoint]:
    candidates = search.candidates()
    for candidate, recompute, zero in itertools.product(_candidates(search.decisions, candidates), RECOMPUTE, ZERO):
        if zero == 0 or candidate.cost.mesh.get("dp", 1) > 1:
            yield PinnedPoint(candidate, recompute, zero)


def _candidates(decisions: OpenDecisions, known: list[JointCandidate]) -> Iterator[JointCandidate]:
    """Every schedule on the meshes and microbatches that the search has."""
    of_meshes = {tuple(each.mesh.items()): each for each in known}
    for like in of_meshes.values():
        stages = like.stages
        for count in decisions.microbatch_counts(like.cost.mesh):
            for schedule in SCHEDULES if stages > 1 else (WITHOUT_STAGES,):
                virtual = schedule.virtual_stages > 1 and stages * schedule.virtual_stages > max(like.least.layers, 1)
                if count >= stages and not (schedule.name == "interleaved" and count % stages) and not virtual:
                    yield replace(like, microbatches=count, schedule=schedule)


def figures(plan: Plan, grid: PinnedGrid, seconds: dict[str, float]) -> dict[str, Any]:
    ours, best = simulate(plan).step_us, min(grid.found, default=None)
    graph = plan.graphs[0]
    return {
        "benchmark": "hand_tuned", **grid.counts, "fit": len(grid.found), "refused": grid.refused, "broken": grid.broken,
        **seconds, "schedules": grid.schedules,
        "unpinned": {"simulated_s": 1e-6 * ours, "objective_s": 1e-6 * plan.predicted.step_time_us, "mesh": dict(plan.mesh),
                     "microbatches": graph.microbatches.count if graph.microbatches else 1,
                     "schedule": graph.pipeline and graph.pipeline.schedule, "again_s": 1e-6 * graph.predicted.again_us,
                     "peak_bytes": plan.memory.peak},
        "best": [{"simulated_s": 1e-6 * us, "objective_s": 1e-6 * objective, "point": point}
                 for us, objective, point in sorted(grid.found)[:5]],
        "ratio": None if best is None else ours / best[0],
        "objective_ratio": None if best is None else plan.predicted.step_time_us / min(us for _, us, _ in grid.found)}


def compare(target: str, cluster_name: str, most: int, seconds: float) -> dict[str, Any]:
    model, batch = load_target(target)
    cluster, traces = Cluster.parse(cluster_name), TracedModel(model, batch, Options.parse({}), known={})
    start = time.process_time()
    plan = plan_open(traces, cluster)
    own = time.process_time()
    grid, search = PinnedGrid(traces, cluster), joint_search_of(traces, cluster)
    if search is not None:
        grid.run([*points_of(search)], simulate(plan).step_us, most, seconds)
    return {"target": target.rpartition(":")[2], "cluster": cluster_name, **figures(plan, grid, {
        "unpinned_cpu_s": own - start, "grid_cpu_s": time.process_time() - own})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--cluster", default="4x8:a100-40g")
    parser.add_argument("--most", type=int, default=40, help="points to plan")
    parser.add_argument("--seconds", type=float, default=200.0, help="CPU time for the points")
    args = parser.parse_args()
    here = Path(__file__).with_name("tuned_models.py")
    pairs = [(f"{here}:{name}", cluster) for name, cluster in TARGETS]
    if args.target != "all":
        pairs = [(args.target, args.cluster)]
    for target, cluster in pairs:
        print(json.dumps(compare(target, cluster, args.most, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
