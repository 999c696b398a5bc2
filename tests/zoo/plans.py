"""Judge `hpml plan` of one architecture: whether it plans, or names, every parameter that a step trains."""
from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import torch

import hpml_compiler
from passes.errors import HpmlError
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
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    try:
        plan = hpml_compiler.plan(model, batch, cluster=CLUSTER)
    except HpmlError as error:
        return Result("refused", str(error), time.perf_counter() - start)
    except Exception as error:
        return Result("crashed", "".join(traceback.format_exception(error)), time.perf_counter() - start)
    in_plan = {name for graph in plan.graphs for name in graph.parameters}
    figures = {"parameters": len(trained), "planned": len(in_plan & trained), "cpu_s": time.process_time() - cpu}
    missing = sorted(trained - in_plan)
    detail = f"{len(missing)} of {len(trained)} parameters are not in the plan: {', '.join(missing[:3])}" if missing else ""
    return Result("different" if missing else "same", detail, time.perf_counter() - start, len(plan.graphs), figures=figures)
