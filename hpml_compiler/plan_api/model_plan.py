"""The plan: placements of every parameter and value, the collectives between them, and predicted costs.

A plan is data: the decisions of the sharding passes, in a form that can be saved, read, compared, edited by hand and
applied again (`options={"plan": path}`) without a solver. Nothing here imports torch or a solver. Its fields are in
plans/content.py; its records and the notation of placements are in plans/schema.py.

Files are strict JSON: unknown fields, NaN and infinities are rejected, and nothing in them is ever executed.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.plan_json import json_content
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.plans.validation_errors import describe_errors
from hpml_compiler.visualize.description.describe_plan import describe
from hpml_compiler.visualize.description.records import PlanDescription
from hpml_compiler.visualize.explanation import explain
from hpml_compiler.visualize.plan_diff import PlanDiff, diff
from passes.errors import BadInput

if TYPE_CHECKING:
    from graphviz import Digraph



class PlanMismatch(BadInput):
    """The given plan is for another graph, another torch release or another number of ranks."""


class Plan(PlanContent):
    """A device mesh and the plans of all graphs on it; see the module's docstring."""

    # -- files and checks ----------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Parse the plan in `text`; `where` names it in errors. Raises BadInput unless it is a complete, valid plan."""
        remake = "make it again with `hpml plan TARGET --save PLAN.json`"
        content = json_content(text, where, remake)
        if content.get("kind") == "mixed":
            raise BadInput(what="this is a mixed plan (groups of different devices), which cannot be run or drawn yet",
                           where=where, next_step="read it with hpml_compiler.plan_api.mixed_plan.MixedPlan.load; each of "
                                                  "its groups has a plan that can be")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise BadInput(what=f"not a valid plan: {describe_errors(error)}", where=where, next_step=remake) from error

    def check(self, graph_hash: str, torch_version: str, world_size: int) -> GraphPlan:
        """The plan of the graph with that hash. Raises PlanMismatch if there is none, or if the number of ranks or the torch
        release (such as 2.13) differs. Patch and build (+cu126) may differ, since the hash covers the graph itself."""
        where = f"plan for {self.world_size} ranks, torch {self.torch_version}"
        again = "plan again, or remove options['plan']"
        if world_size != self.world_size:
            what = f"the plan is for {self.world_size} ranks (mesh {self.mesh}), but this run has {world_size}"
            raise PlanMismatch(what=what, where=where, next_step=f"start {self.world_size} ranks, or {again}")
        if _release(torch_version) != _release(self.torch_version):
            raise PlanMismatch(what=f"the plan was made with torch {self.torch_version}, but this is torch {torch_version}",
                               where=where, next_step=again)
        for graph in self.graphs:
            if graph.graph_hash == graph_hash:
                return graph
        known = ", ".join(f"{graph.name} ({graph.graph_hash[:12]})" for graph in self.graphs) or "none"
        what = f"the plan is for another model or batch: it has no graph {graph_hash[:12]}, only {known}"
        raise PlanMismatch(what=what, where=where, next_step=again)

    # -- for people (hpml_compiler/visualize; imported late, so that a plan loads without rich) ------------------------

    def table(self, width: int | None = None) -> str:
        """The plan as a text table of at most `width` columns (default: the terminal's): a row per class of equal blocks."""
        from hpml_compiler.visualize.plan_table import render_text

        return render_text(self, width)

    def explain(self, name: str, width: int | None = None) -> str:
        """Explain the placement of the node or parameter `name`, the reason for it and its cost, in lines of at most `width`
        characters (None: of any length). Raises BadInput with the closest names."""
        from hpml_compiler.visualize.terminal import wrapped

        text = explain(self, name)
        return text if width is None else wrapped(text, width)

    def diff(self, other: Plan) -> PlanDiff:
        """Changes from this plan to `other`; `str()` of the result is readable text."""
        return diff(self, other)

    def graphviz(self, expanded: bool = False, expand: str | Sequence[str] = (), max_nodes: int = 300, *,
                 view: Literal["overview", "block", "operators"] | None = None, block: str | None = None,
                 backward: bool = False) -> Digraph:
        """The plan as a Graphviz graph. view: "overview": pipeline stages, or modules, with their sharding, times and memory;
        "block": the operators and collectives of the module `block` (default: the costliest), with `backward` beside forward;
        "operators": all operators, which `expanded` asks for, too; `expand` opens the named modules only."""
        from hpml_compiler.visualize.drawings.graphviz_drawing import digraph

        return digraph(self, expanded=expanded, expand=expand, max_nodes=max_nodes, view=view, block=block, backward=backward)

    def describe(self) -> PlanDescription:
        """The plan as data for people, which tables and pictures show: `to_json()` of the result is plain JSON values."""
        return describe(self)

    def render(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Draw `graphviz(**options)` into `path` (.svg, .png, .pdf). If `dot` is not installed, writes the .gv file next to it
        and raises MissingDependency."""
        from hpml_compiler.visualize.drawings.graphviz_drawing import render

        return render(self, Path(path), **options)


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
