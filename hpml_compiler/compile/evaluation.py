"""A graph without gradients, as an evaluation has it, through the stages that have its parameters: forward alone."""
from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile.lowering import takes_list
from hpml_compiler.compile.pipeline import Pipeline
from hpml_compiler.planning.staged_body import StagedBody
from hpml_compiler.runtime.microbatches import Call
from passes.analysis.stages import TooFewParts
from passes.errors import BadInput
from passes.rules.repeatable import is_repeatable


def has_effects(gm: GraphModule) -> bool:
    """Whether something happens besides what is returned, or random numbers are drawn."""
    return any(node.op == "call_function" and not is_repeatable(node) for node in gm.graph.nodes)


class Evaluation(Pipeline):
    """starts: as where the model is trained; if this graph has no such blocks, it is cut by its own times."""

    def cut_in_stages(self) -> StagedBody:
        try:
            return super().cut_in_stages()
        except TooFewParts:
            raise
        except BadInput:
            if not self.starts:
                raise
            self.starts = ()
            return super().cut_in_stages()

    def call(self) -> Call:
        schedule, loop = self.schedule(), self.loop

        def run(arguments: list[Any]) -> list[Any]:
            values = dict(zip(loop.given, arguments, strict=True))
            arguments.clear()
            schedule.all_forward(values, saves=False)
            return schedule.results(values, loop.results)

        return takes_list(run)
