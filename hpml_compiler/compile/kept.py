"""Under a byte budget: what of one graph's forward is kept for backward."""
from __future__ import annotations

import logging

from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.options import Options
from hpml_compiler.planning.plan_graph import solver_options
from hpml_compiler.visualize.text import format_bytes, format_us
from passes import compat
from passes.annotations import read
from passes.errors import Infeasible
from passes.keeping.keys import KEPT, KeptNodes
from passes.partition.keep import Keep
from passes.presets import keeping

log = logging.getLogger("hpml")
WHERE = "options['memory_budget']"


def decide_kept(joint: GraphModule, forward_outputs: int, state_bytes: int, options: Options, name: str, strict: bool,
                ) -> KeptNodes:
    """Of a graph that has its tape. state_bytes: of parameters and optimizer state. The graphs of a step that were compiled
    before hold what they keep while this one runs. strict: raise Infeasible where the budget cannot be met; else the answer is
    what holds least."""
    budget = options.memory_budget
    assert budget is not None, "there is a budget"
    others = held_by_other_graphs()
    left = budget - state_bytes - others
    if left <= 0 and strict:
        raise Infeasible(
            f"parameters and optimizer state take {format_bytes(state_bytes)}, what other graphs of the step keep "
            f"{format_bytes(others)}, and the budget is {format_bytes(budget)}", WHERE, "give more bytes or more devices")
    keeping(forward_outputs, Keep(max(left, 1.0), solver_options(options), strict))(joint)
    kept = read(KEPT, joint)
    log.info("%s: %d values are kept for backward, %d calls run once more (%s); it holds %s at most besides %s of parameters "
             "and optimizer state", name, len(kept.names), kept.again, format_us(kept.again_us), format_bytes(kept.peak_bytes),
             format_bytes(state_bytes))
    if kept.offloaded:
        log.info("%s: %d of these, %s, are offloaded (%s)", name, len(kept.offloaded), format_bytes(kept.offloaded_bytes),
                 format_us(kept.offload_us))
    return kept


def held_by_other_graphs() -> int:
    """What those of the step that were compiled before keep between forward and backward."""
    frame = compat.frame_being_compiled()
    return sum(nbytes for key, nbytes in session.current().saved_bytes.items() if key != frame)


def note_kept(kept: KeptNodes) -> None:
    """What this graph keeps counts for those that are compiled after it."""
    session.current().saved_bytes[compat.frame_being_compiled()] = kept.saved_bytes
