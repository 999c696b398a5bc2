"""Draw a plan with Graphviz, in one of its views, and write the picture."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphviz

from hpml_compiler.plans.content import PlanContent
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.visualize.description.block_summary import block_summary
from hpml_compiler.visualize.description.describe_plan import describe
from hpml_compiler.visualize.description.module_classes import ModuleClass, module_classes, named
from hpml_compiler.visualize.drawings.block_drawing import draw_block
from hpml_compiler.visualize.drawings.operators_drawing import draw_operators, unknown_module
from hpml_compiler.visualize.drawings.overview_drawing import overview
from hpml_compiler.visualize.picture_files import picture_format
from passes.errors import BadInput, MissingDependency, shortened
from passes.filesystem.text_files import is_device, write_file

VIEWS = ("overview", "block", "operators")


def digraph(plan: PlanContent, expanded: bool = False, expand: str | Sequence[str] = (), max_nodes: int = 300,
            view: str | None = None, block: str | None = None, backward: bool = False) -> graphviz.Digraph:
    """The plan as a graph. view: "overview" (stages or modules), "block" (the operators of the module `block`, or of the
    costliest one, with `backward` too), or "operators": at most `max_nodes` nodes, a label counts those left out.

    `expanded` draws the operators of every class of modules, `expand` of the named ones, by their name in the table or the path
    of any module of the class. Raises BadInput for an unknown view, and for a name that no module has.
    """
    names = {expand} if isinstance(expand, str) else set(expand)
    view = view or ("operators" if expanded or names else "block" if block is not None else "overview")
    if view not in VIEWS:
        raise BadInput(what=f"there is no view {shortened(view)}", where="graphviz(view=...)",
                       next_step=f"the views are {', '.join(VIEWS)}")
    if view == "overview":
        return overview(describe(plan), max_nodes)
    if view == "operators":
        return draw_operators(plan, expanded or not names, names, max_nodes)
    for graph in plan.step_graphs:
        classes = module_classes(graph)
        each = _costliest(graph, classes) if block is None else named(classes, block)
        if each is not None:
            return draw_block(describe(plan), block_summary(graph, each, backward), backward)
    raise unknown_module(plan, {block or ""}, "graphviz(block=...)")


def _costliest(graph: GraphPlan, classes: Sequence[ModuleClass]) -> ModuleClass | None:
    def cost_us(each: ModuleClass) -> float:
        return sum(graph.operations[name].predicted_us * runs for name, runs in each.runs.items())

    return max(classes, key=cost_us, default=None)


def render(plan: PlanContent, path: Path, **options: Any) -> Path:
    """Draw a plan into `path` (.svg, .png, .pdf). Raises BadInput for another suffix. If the program `dot` is not installed,
    writes the .gv file next to `path` and raises MissingDependency."""
    kind = picture_format(path, "the plan")
    drawing = digraph(plan, **options)
    try:
        write_file(path, drawing.pipe(format=kind), "the picture of the plan")
    except graphviz.ExecutableNotFound as error:
        source = Path("plan.gv") if is_device(path) else path.with_suffix(".gv")
        write_file(source, drawing.source, "the graph of the plan")
        raise MissingDependency(
            what=f"cannot draw {path.name}: Graphviz's program dot is not installed",
            where=f"the graph is in {source}",
            next_step=f"apt-get install graphviz, then dot -T{kind} {source} -o {path}",
        ) from error
    return path
