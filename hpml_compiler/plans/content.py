"""The fields of a plan and totals over its graphs, as read by drawings, tables and the simulator."""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, JsonValue, model_validator

from hpml_compiler.plans.memory_records import Peak
from hpml_compiler.plans.peak_memory import counted_peak
from hpml_compiler.plans.pipeline_records import PipelinePlan, StagePlan
from hpml_compiler.plans.plan_json import FORMAT_VERSION, PlanFile
from hpml_compiler.plans.record_fields import Mesh, Record
from hpml_compiler.plans.schema import (
    CollectiveTotal,
    GraphPlan,
    MemoryBytes,
    MeshAttempt,
    PredictedCost,
    SolverReport,
    UnplannedPart,
    collective_totals,
)
from passes.hardware.mesh import links_of_axes

STAGES_AXIS = "pp"
PHASES = ("trace", "annotate", "solve", "rewrite", "compile forward", "compile backward")


class PlanContent(PlanFile):
    """Contents of a plan and the totals derived from them. `options`: the options that the plan was made with. `at_peak`: the
    memory peak of a step that runs several graphs. `rejected`: meshes that were tried and not chosen. `unplanned`: parts of the
    step behind a graph break."""

    format_version: int = FORMAT_VERSION
    torch_version: str
    world_size: Annotated[int, Field(ge=1)]
    mesh: Mesh
    options: dict[str, JsonValue]
    graphs: Annotated[tuple[GraphPlan, ...], Field(strict=False)]
    rejected: Annotated[tuple[MeshAttempt, ...], Field(strict=False)] = ()
    unplanned: Annotated[tuple[UnplannedPart, ...], Field(strict=False)] = ()
    at_peak: Peak | None = None

    @model_validator(mode="after")
    def _one_mesh(self) -> PlanContent:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {self.format_version}, this hpml reads {FORMAT_VERSION}")
        if math.prod(self.mesh.values()) != self.world_size:
            raise ValueError(f"the mesh {self.mesh} does not multiply to world_size {self.world_size}")
        if self.hardware is not None and self.hardware.world_size != self.world_size:
            raise ValueError(f"hardware has {self.hardware.world_size} devices, world_size is {self.world_size}")
        for graph in self.graphs:
            if list(graph.mesh.items()) != list(self.mesh.items()):
                raise ValueError(f"graph {graph.name!r} has the mesh {graph.mesh}, the plan has {self.mesh}")
        return self

    # -- costs ---------------------------------------------------------------------------------------------------------

    @property
    def step_graphs(self) -> tuple[GraphPlan, ...]:
        """The graphs that one step runs: the training graphs, or all graphs if none trains. Of a frame that was recompiled (as
        HF BERT is after its first call) only the last graph counts."""
        training = [graph for graph in self.graphs if graph.training] or self.graphs
        last = {graph.frame: graph.name for graph in training}
        return tuple(graph for graph in training if not graph.frame or last[graph.frame] == graph.name)

    @property
    def predicted(self) -> PredictedCost:
        """Predicted cost of a step: the sum over its graphs, which run one after another."""
        return PredictedCost(**_sums((graph.predicted for graph in self.step_graphs), PredictedCost))

    @property
    def power_w(self) -> float | None:
        """Predicted average power of one device during a step, in W; None if energy was not computed."""
        cost = self.predicted
        if cost.energy_j is None or not cost.step_time_us:
            return None
        return cost.energy_j / (cost.step_time_us * 1e-6) / self.world_size

    @property
    def links(self) -> dict[str, str]:
        """Kind of link that the process groups of each mesh axis use; empty if the plan does not name the cluster."""
        found = re.fullmatch(r"(\d+)x(\d+):[^+]*", self.cluster or "")
        return links_of_axes(self.mesh, int(found[2])) if found and int(found[1]) * int(found[2]) == self.world_size else {}

    @property
    def memory(self) -> MemoryBytes:
        """Memory of a step: the sum over its graphs (an upper bound if they share parameters), and the peak of the step."""
        found = MemoryBytes(**_sums((graph.memory for graph in self.step_graphs), MemoryBytes))
        return found if self.peak is None else found.model_copy(update={"peak": self.peak.bytes})

    @property
    def peak(self) -> Peak | None:
        """The memory peak of a step; None for a plan that is written by hand."""
        graphs = self.step_graphs
        if self.at_peak is not None or len(graphs) != 1:
            return self.at_peak
        return graphs[0].at_peak or counted_peak([graph for graph in graphs if graph.training])

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of compilation by phase, in the order of the phases, summed over all compiled graphs."""
        phases = [*PHASES, *(phase for graph in self.graphs for phase in graph.seconds)]
        return {phase: sum(graph.seconds.get(phase, 0.0) for graph in self.graphs)
                for phase in dict.fromkeys(phases) if any(phase in graph.seconds for graph in self.graphs)}

    @property
    def collectives(self) -> dict[str, CollectiveTotal]:
        """Collectives of one step by kind."""
        return collective_totals(move for graph in self.step_graphs for move in graph.redistributions)

    def summary_json(self) -> dict[str, Any]:
        """The output of `hpml plan --json`: plain JSON values; times in seconds, bytes per device."""
        graphs = self.step_graphs
        solvers = [graph.solver for graph in graphs]
        objective = solvers[0].objective if solvers else "time"
        bounds = [solver.bound for solver in solvers]
        bound = None if None in bounds else sum(b for b in bounds if b is not None) * 1e-6
        gaps = [solver.gap for solver in solvers]
        cost = self.predicted
        simulated, least = _simulated_s(solvers)
        return {
            "step_time_s": cost.step_time_us * 1e-6,
            "objective": objective,
            "bound_s": bound if objective == "time" else None,
            "bound_j": bound * self.world_size if bound is not None and objective == "energy" else None,
            "gap": None if None in gaps else max((g for g in gaps if g is not None), default=0.0),
            "simulated_s": simulated,
            "step_bound_s": least,
            "step_gap": 1.0 - least / simulated if simulated and least is not None else None,
            "status": ", ".join(dict.fromkeys(solver.status for solver in solvers)),
            "mesh": dict(self.mesh),
            **_loop_json(graphs),
            "links": self.links,
            "world_size": self.world_size,
            "cluster": self.cluster,
            "energy_j": cost.energy_j,
            "energy_label": cost.energy_label,
            "power_w": self.power_w,
            "memory_bytes": self.memory.model_dump(),
            "collectives": {kind: asdict(total) for kind, total in self.collectives.items()},
            "predicted_s": {"compute": cost.compute_us * 1e-6, "communication": cost.communication_us * 1e-6,
                            "optimizer": cost.optimizer_us * 1e-6, "again": cost.again_us * 1e-6},
            "ilp": {"variables": sum(s.variables for s in solvers), "binaries": sum(s.binaries for s in solvers),
                    "constraints": sum(s.constraints for s in solvers)},
            "seconds": dict.fromkeys(PHASES[:4], 0.0) | self.seconds,
            "unplanned": [part.model_dump(mode="json") for part in self.unplanned],
            "rejected": [attempt.model_dump(mode="json") for attempt in self.rejected],
            "families": _families_json(self.mesh, solvers[0].cost if len(solvers) == 1 else None, self.rejected,
                                       ("s", 1e-6) if objective == "time" else ("j", 1e-6 * self.world_size)),
            "stages": _stages_json(graphs[0].pipeline if graphs else None),
        }


def _loop_json(graphs: Sequence[GraphPlan]) -> dict[str, Any]:
    """Microbatches of a step, and its schedule where it has stages."""
    pipe = next((graph.pipeline for graph in graphs if graph.pipeline is not None), None)
    count = max((graph.microbatches.count for graph in graphs if graph.microbatches is not None), default=1)
    return {"microbatches": count if pipe is None else pipe.microbatches, "schedule": None if pipe is None else pipe.schedule,
            "virtual_stages": 1 if pipe is None else pipe.virtual_stages}


def _simulated_s(solvers: Sequence[SolverReport]) -> tuple[float | None, float | None]:
    """The simulated step, where configurations were compared by it, and its bound, where time was minimized: those of one
    graph."""
    if len(solvers) != 1 or (us := solvers[0].simulated_us) is None:
        return None, None
    return us * 1e-6, None if (bound := solvers[0].simulated_bound_us) is None else bound * 1e-6


def _sums(parts: Iterable[Record], kind: type[Record]) -> dict[str, Any]:
    """Each field summed over the parts: None if it is None in any part; a string if all parts agree on it, else None."""
    parts = list(parts)
    if not parts:
        return {field: 0 for field, info in kind.model_fields.items() if info.is_required()}
    return {field: _sum([getattr(part, field) for part in parts]) for field in kind.model_fields}


def _sum(values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if any(isinstance(value, str) for value in values):
        return values[0] if len(set(values)) == 1 else None
    return sum(values)


def _families_json(mesh: Mapping[str, int], cost: float | None, rejected: Sequence[MeshAttempt],
                   unit: tuple[str, float]) -> list[dict[str, Any]]:
    """By number of stages, fewest first: the configuration with the least cost, or where none was planned with the least bound,
    the least bound of all, and why it was not chosen; no reason for the answer's number. mesh, cost: of the answer. unit:
    its suffix, and the factor from a solver's cost."""
    found: dict[int, list[MeshAttempt]] = {mesh.get(STAGES_AXIS, 1): []}
    for each in rejected:
        found.setdefault(each.mesh.get(STAGES_AXIS, 1), []).append(each)
    return [_family(stages, dict(mesh) if stages == mesh.get(STAGES_AXIS, 1) else None, cost, found[stages], *unit)
            for stages in sorted(found)]


def _family(stages: int, chosen: dict[str, int] | None, cost: float | None, others: Sequence[MeshAttempt], suffix: str,
            factor: float) -> dict[str, Any]:
    bound = min((each.bound for each in others if each.bound is not None), default=None)
    best = None if chosen is not None else min(others, key=lambda each: (each.cost is None, each.cost or each.bound or 0.0))
    cost = cost if best is None else best.cost
    return {"stages": stages, "mesh": chosen if best is None else dict(best.mesh),
            f"cost_{suffix}": None if cost is None else cost * factor,
            f"bound_{suffix}": None if bound is None else bound * factor, "reason": None if best is None else best.reason}


def _stages_json(pipeline: PipelinePlan | None) -> list[dict[str, Any]]:
    """The stages of a pipeline: their blocks, times of a step and bytes by part."""
    return [] if pipeline is None else [_stage(each, pipeline.microbatches) for each in pipeline.stages]


def _stage(stage: StagePlan, microbatches: int) -> dict[str, Any]:
    kept = stage.kept
    return {
        "rank": stage.rank, "blocks": list(stage.blocks),
        "seconds": {"forward": microbatches * stage.forward_us * 1e-6, "backward": microbatches * stage.backward_us * 1e-6,
                    "again": stage.again_us * 1e-6},
        "bytes": {"parameters": stage.parameter_bytes, "resident": stage.resident_bytes,
                  "saved": stage.saved_bytes * stage.in_flight},
        "in_flight": stage.in_flight, "saved_values": [] if kept is None else list(kept.saved),
        "recomputed": [] if kept is None else list(kept.again)}
