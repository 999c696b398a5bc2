"""Inference through the pipeline stages that have the parameters: forward alone, as for an evaluation."""
from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.lower.lowering import mark_boxed
from hpml_compiler.compile.program.pipeline_runtime import PipelineRuntime
from hpml_compiler.runtime.program.microbatch_loop import Call
from passes.op_rules.recomputable import is_recomputable


def has_effects(gm: GraphModule) -> bool:
    """True if a graph has side effects or draws random numbers."""
    return any(node.op == "call_function" and not is_recomputable(node) for node in gm.graph.nodes)


def forward_only(runs: PipelineRuntime) -> Call:
    schedule, loop = runs.schedule(), runs.parts.loop

    def run(arguments: list[Any]) -> list[Any]:
        values = dict(zip(loop.given, arguments, strict=True))
        arguments.clear()
        schedule.all_forward(values, saves=False)
        return schedule.results(values, loop.results)

    return mark_boxed(run)
