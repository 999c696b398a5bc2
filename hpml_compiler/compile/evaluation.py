"""A graph without gradients, as an evaluation has it, through the stages that have its parameters: forward alone."""
from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.lowering import takes_list
from hpml_compiler.compile.pipeline import Pipeline
from hpml_compiler.runtime.microbatches import Call
from passes.rules.repeatable import is_repeatable


def has_effects(gm: GraphModule) -> bool:
    """Whether something happens besides what is returned, or random numbers are drawn."""
    return any(node.op == "call_function" and not is_repeatable(node) for node in gm.graph.nodes)


def evaluation(runs: Pipeline) -> Call:
    schedule, loop = runs.schedule(), runs.parts.loop

    def run(arguments: list[Any]) -> list[Any]:
        values = dict(zip(loop.given, arguments, strict=True))
        arguments.clear()
        schedule.all_forward(values, saves=False)
        return schedule.results(values, loop.results)

    return takes_list(run)
