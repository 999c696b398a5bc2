"""Pass: apply the checkpointing decision of a saved plan."""
from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import GraphModule

from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION, STORAGE_PROGRAM
from passes.checkpointing.solve_checkpointing import decision_of_trace
from passes.errors import BadInput
from passes.registry import register
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import StorageProgram

WHERE = "the plan's `kept`"
AGAIN = "plan again, for the model, the batch and the options that it runs with"


@register
@dataclass(frozen=True)
class ObeyCheckpointing(AnalysisPass):
    """Writes `CHECKPOINT_DECISION`: saves `names`, offloads those in `offloaded`, with bytes from a memory trace.
    These may exceed `budget_bytes`, less the bytes of others meanwhile (`after_bytes`).

    Raises BadInput for names that are not in this graph or cannot be saved, and if a needed value is neither saved nor
    recomputable.
    """

    name = "obey_checkpointing"
    requires = (STORAGE_PROGRAM,)
    provides = (CHECKPOINT_DECISION,)

    names: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    budget_bytes: float = float("inf")
    after_bytes: int = 0

    def run(self, graph_module: GraphModule) -> None:
        program = replace(read(STORAGE_PROGRAM, graph_module), after_bytes=self.after_bytes)
        kept, offloaded = _numbers(program, self.names), _numbers(program, self.offloaded)
        if wrong := _named(program, offloaded - program.offloadable):
            raise BadInput(f"{wrong} cannot be offloaded here", WHERE, 'give offload="saved", if the plan was made with it')
        if wrong := _named(program, (kept | offloaded) & program.never_saved):
            raise BadInput(f"the script's own checkpointing, or options['recompute'], recomputes {wrong}", WHERE, AGAIN)
        walked = simulate_memory(program, kept, offloaded)
        if wrong := _named(program, walked.saved - kept - offloaded):
            raise BadInput(f"{wrong} is not saved and cannot be recomputed", WHERE, AGAIN)
        write(CHECKPOINT_DECISION, graph_module, decision_of_trace(walked, self.budget_bytes, 0.0))


def _numbers(program: StorageProgram, names: frozenset[str]) -> frozenset[int]:
    known = {program.storages[s].name: s for s in program.candidates}
    if unknown := sorted(names - known.keys()):
        raise BadInput(f"backward of this graph finds no {', '.join(unknown[:3])}", WHERE, AGAIN)
    return frozenset(known[name] for name in names)


def _named(program: StorageProgram, storages: frozenset[int]) -> str:
    return ", ".join(sorted(program.storages[s].name or "a result without a name" for s in storages)[:3])
