"""The plan: where every parameter and value lives, what is communicated, what it is predicted to cost.

A plan is data. It is what the partition passes decided, written down so that it can be saved, read, compared, edited by
hand and obeyed again (`options={"plan": path}`) without a solver. Nothing here imports torch or a solver. Its parts,
and the words for placements, are in plan_records.py.

Files are strict JSON: unknown fields, NaN and infinities are refused, and nothing in them is ever executed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, JsonValue, ValidationError, model_validator

from hpml_compiler.plans.files import FORMAT_VERSION, PlanFile, json_content
from hpml_compiler.plans.schema import (
    CollectiveTotal,
    GraphPlan,
    LeftWhole,
    MemoryBytes,
    Mesh,
    MeshAttempt,
    OperationPlan,
    ParameterPlan,
    PredictedCost,
    Record,
    Redistribution,
    SolverReport,
    Step,
    collective_totals,
)
from passes.errors import BadInput

if TYPE_CHECKING:
    from graphviz import Digraph

    from hpml_compiler.visualize.diff import PlanDiff

__all__ = [
    "FORMAT_VERSION",
    "CollectiveTotal",
    "GraphPlan",
    "LeftWhole",
    "MemoryBytes",
    "MeshAttempt",
    "OperationPlan",
    "ParameterPlan",
    "Plan",
    "PlanMismatch",
    "PredictedCost",
    "Redistribution",
    "SolverReport",
    "Step",
]


class PlanMismatch(BadInput):
    """A plan was given for another graph, another torch release or another number of ranks."""


class Plan(PlanFile):
    """A mesh and the plans of all graphs on it; see the module's docstring. `options` are those it was made with."""

    format_version: int = FORMAT_VERSION
    torch_version: str
    world_size: Annotated[int, Field(ge=1)]
    cluster: str | None
    mesh: Mesh
    options: dict[str, JsonValue]
    graphs: Annotated[tuple[GraphPlan, ...], Field(strict=False)]
    rejected: Annotated[tuple[MeshAttempt, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _one_mesh(self) -> Plan:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {self.format_version}, this hpml reads {FORMAT_VERSION}")
        if math.prod(self.mesh.values()) != self.world_size:
            raise ValueError(f"the mesh {self.mesh} does not multiply to world_size {self.world_size}")
        for graph in self.graphs:
            if list(graph.mesh.items()) != list(self.mesh.items()):
                raise ValueError(f"graph {graph.name!r} has the mesh {graph.mesh}, the plan has {self.mesh}")
        return self

    # -- what it costs -------------------------------------------------------------------------------------------------

    @property
    def step_graphs(self) -> tuple[GraphPlan, ...]:
        """The graphs that one step runs: those that train, or all where none does; of what was compiled again, as HF BERT
        is after its first call, the last graph alone."""
        training = [graph for graph in self.graphs if graph.training] or self.graphs
        last = {graph.frame: graph.name for graph in training}
        return tuple(graph for graph in training if not graph.frame or last[graph.frame] == graph.name)

    @property
    def predicted(self) -> PredictedCost:
        """Sum over the graphs of a step, which run one after another."""
        return PredictedCost(**_sums((graph.predicted for graph in self.step_graphs), PredictedCost))

    @property
    def power_w(self) -> float | None:
        """Predicted average power of one device during a step; None where its energy was not computed."""
        cost = self.predicted
        if cost.energy_j is None or not cost.step_time_us:
            return None
        return cost.energy_j / (cost.step_time_us * 1e-6) / self.world_size

    @property
    def memory(self) -> MemoryBytes:
        """Sum over the graphs of a step: an upper bound where several graphs share parameters."""
        return MemoryBytes(**_sums((graph.memory for graph in self.step_graphs), MemoryBytes))

    @property
    def collectives(self) -> dict[str, CollectiveTotal]:
        """Collectives of one step by kind."""
        return collective_totals(move for graph in self.step_graphs for move in graph.redistributions)

    def summary_json(self) -> dict[str, Any]:
        """What `hpml plan --json` prints: plain JSON values; times in seconds, bytes per device."""
        graphs = self.step_graphs
        solvers = [graph.solver for graph in graphs]
        objective = solvers[0].objective if solvers else "time"
        bounds = [solver.bound_us for solver in solvers]
        bound = None if None in bounds else sum(b for b in bounds if b is not None) * 1e-6
        gaps = [solver.gap for solver in solvers]
        phases = dict.fromkeys(["trace", "annotate", "solve", "rewrite", *(k for g in self.graphs for k in g.seconds)])
        cost = self.predicted
        return {
            "step_time_s": cost.step_time_us * 1e-6,
            "objective": objective,
            "bound_s": bound if objective == "time" else None,
            "bound_j": bound * self.world_size if bound is not None and objective == "energy" else None,
            "gap": None if None in gaps else max((g for g in gaps if g is not None), default=0.0),
            "status": ", ".join(dict.fromkeys(solver.status for solver in solvers)),
            "mesh": dict(self.mesh),
            "world_size": self.world_size,
            "cluster": self.cluster,
            "energy_j": cost.energy_j,
            "energy_label": cost.energy_label,
            "power_w": self.power_w,
            "memory_bytes": self.memory.model_dump(),
            "collectives": {kind: asdict(total) for kind, total in self.collectives.items()},
            "predicted_s": {"compute": cost.compute_us * 1e-6, "communication": cost.communication_us * 1e-6,
                            "optimizer": cost.optimizer_us * 1e-6},
            "ilp": {"variables": sum(s.variables for s in solvers), "binaries": sum(s.binaries for s in solvers),
                    "constraints": sum(s.constraints for s in solvers)},
            "seconds": {phase: sum(graph.seconds.get(phase, 0.0) for graph in self.graphs) for phase in phases},
            "rejected": [attempt.model_dump(mode="json") for attempt in self.rejected],
        }

    # -- files and checks ----------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """The plan in `text`; `where` names it in errors. Raises BadInput for anything but a whole, valid plan."""
        remake = "make it again with `hpml plan TARGET --save PLAN.json`"
        content = json_content(text, where, remake)
        if content.get("kind") == "mixed":
            raise BadInput(what="this plan is for groups of different devices; such plans cannot be run or drawn as one yet",
                           where=where, next_step="read it with hpml_compiler.mixed.plan.MixedPlan.load; each of its groups "
                           "has a plan for like devices")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise BadInput(what=f"not a valid plan: {describe_errors(error)}", where=where, next_step=remake) from error

    def check(self, graph_hash: str, torch_version: str, world_size: int) -> GraphPlan:
        """The plan of the graph with that hash. Raises PlanMismatch if there is none, if the number of ranks differs,
        or the torch release (2.13; a patch or build such as +cu126 may differ: the hash guards the graph itself)."""
        where = f"plan for {self.world_size} ranks, torch {self.torch_version}"
        again = "plan again, or leave out options={'plan': ...}"
        if world_size != self.world_size:
            what = f"the plan is for {self.world_size} ranks (mesh {self.mesh}), here are {world_size}"
            raise PlanMismatch(what=what, where=where, next_step=f"start {self.world_size} ranks, or {again}")
        if _release(torch_version) != _release(self.torch_version):
            raise PlanMismatch(what=f"the plan was made with torch {self.torch_version}, here is {torch_version}",
                               where=where, next_step=again)
        for graph in self.graphs:
            if graph.graph_hash == graph_hash:
                return graph
        known = ", ".join(f"{graph.name} ({graph.graph_hash[:12]})" for graph in self.graphs) or "none"
        what = f"the plan is of another model or batch: it has no graph {graph_hash[:12]}, it has {known}"
        raise PlanMismatch(what=what, where=where, next_step=again)

    # -- for people (hpml_compiler/visualize; imported late, so that a plan loads without rich) ------------------------

    def table(self, width: int | None = None) -> str:
        """The plan as text, as wide as the terminal: a row per class of equal blocks."""
        from hpml_compiler.visualize.table import render_text

        return render_text(self, width)

    def explain(self, name: str, width: int | None = None) -> str:
        """Where the node or parameter `name` lives, why and at what cost, in lines of at most `width` (None: of any
        length). Raises BadInput with the closest names."""
        from hpml_compiler.visualize.explain import explain
        from hpml_compiler.visualize.terminal import wrapped

        text = explain(self, name)
        return text if width is None else wrapped(text, width)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to `other`; `str()` of the result is text for people."""
        from hpml_compiler.visualize.diff import diff

        return diff(self, other)

    def graphviz(self, expanded: bool = False, expand: str | Sequence[str] = (), max_nodes: int = 300) -> Digraph:
        """The plan as a graph: a node per class of equal blocks; all of them, or those named, opened as clusters."""
        from hpml_compiler.visualize.graphviz import digraph

        return digraph(self, expanded=expanded, expand=expand, max_nodes=max_nodes)

    def render(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Draw `graphviz(**options)` into `path` (.svg, .png, .pdf). Without `dot` writes the .gv beside it and raises
        MissingDependency."""
        from hpml_compiler.visualize.graphviz import render

        return render(self, Path(path), **options)


def describe_errors(error: ValidationError, most: int = 3) -> str:
    """The first few errors of pydantic as one line: where in the data, and what is wrong there."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    places = [".".join(map(str, each["loc"])) for each in found]
    lines = [f"{place}: {each['msg']}".removeprefix(": ").replace("Value error, ", "")
             for place, each in zip(places, found, strict=True)]
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _sums(parts: Iterable[Record], kind: type[Record]) -> dict[str, Any]:
    """Each field summed over the parts: None if any part has none; of a text, that of all parts if they agree."""
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
