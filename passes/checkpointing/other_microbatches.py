"""Pass: count other microbatches in a storage program, beside those that one run of it takes."""
from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import GraphModule

from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM
from passes.registry import register
from passes.simulation.memory.storage_program import Microbatches


@register
@dataclass(frozen=True)
class CountOtherMicrobatches(AnalysisPass):
    """Writes `STORAGE_PROGRAM` again, with other `microbatches` than it was built with."""

    name = "count_other_microbatches"
    requires = (STORAGE_PROGRAM,)
    provides = (STORAGE_PROGRAM,)

    microbatches: Microbatches = Microbatches()

    def run(self, graph_module: GraphModule) -> None:
        write(STORAGE_PROGRAM, graph_module, replace(read(STORAGE_PROGRAM, graph_module), microbatches=self.microbatches))
