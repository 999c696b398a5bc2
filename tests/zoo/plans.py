"""Judge `hpml plan` of one architecture: all parameters that a step trains are planned or listed, and its figures agree."""
from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import torch

import hpml_compiler
from passes.errors import HpmlError
from tests.hpml_compiler.planner.figures import check_figures
from tests.scripts.snapshot import Leaf
from tests.zoo.models import Architecture

if TYPE_CHECKING:
    from tests.zoo.judge import Result

CLUSTER = "1x2:a100-80g"


def planned(architecture: Architecture, dtype: torch.dtype, expected: tuple[Leaf, ...]) -> Result:
    from tests.zoo.judge import Result

    start, cpu = time.perf_counter(), time.process_time()
    torch._dynamo.reset()
    model, batch = architecture.make(dtype)
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}  # a tied parameter has several
    gradients = {name: value for name, value in expected if name.endswith(".grad")}
    trained = {names[name] for name in names if gradients[f"seen.returned[1].{name}.grad"] is not None}
    try:
        plan = hpml_compiler.plan(model, batch, cluster=CLUSTER)
    except HpmlError as error:
        return Result("refused", str(error), time.perf_counter() - start)
    except Exception as error:
        return Result("crashed", "".join(traceback.format_exception(error)), time.perf_counter() - start)
    try:
        if plan.step_graphs:
            check_figures(plan)
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        return Result("different", f"figures of the plan disagree: {line}", time.perf_counter() - start, len(plan.graphs))
    in_plan = {names[name] for graph in plan.graphs for name in graph.parameters}
    listed = {names[name] for part in plan.unplanned for name in part.parameters}
    figures = {"parameters": len(trained), "planned": len(in_plan & trained), "cpu_s": time.process_time() - cpu}
    seconds, graphs = time.perf_counter() - start, len(plan.graphs)
    if missing := [name for name in names if names[name] in trained - in_plan - listed]:
        detail = f"{len(missing)} names of parameters are neither in the plan nor unplanned: {', '.join(missing[:3])}"
        return Result("different", detail, seconds, graphs, figures=figures)
    if wrong := [name for part in plan.unplanned if not part.used for name in part.parameters if names[name] in trained]:
        return Result("different", f"said to have no gradients: {', '.join(wrong[:3])}", seconds, graphs, figures=figures)
    if unplanned := trained - in_plan:
        reason = next(part.reason for part in plan.unplanned if part.used)
        detail = f"{len(unplanned)} of {len(trained)} parameters are unplanned: {reason}"
        return Result("refused", detail, seconds, graphs, figures=figures)
    return Result("same", "", seconds, graphs, figures=figures)
