"""Under a byte budget: what of one graph's forward is kept for backward."""
from __future__ import annotations

import logging

from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.options import Options
from hpml_compiler.planning.plan_graph import solver_options
from hpml_compiler.plans.kept import CallAgain, FullestMoment, KeptPlan, KeptValue, OffloadedValue
from hpml_compiler.visualize.text import format_bytes, format_us
from passes import compat
from passes.annotations import read
from passes.errors import Infeasible
from passes.keeping.account import account
from passes.keeping.keep import TooSmall
from passes.keeping.keys import KEPT, KeptNodes
from passes.keeping.walk import Walk
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
    try:
        keeping(forward_outputs, Keep(max(left, 1.0), solver_options(options), strict))(joint)
    except TooSmall as error:
        assert error.walk is not None, "the least that was found comes with it"
        raise _too_small(error.walk, state_bytes, others, budget) from None
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


def _too_small(least: Walk, state_bytes: int, others: int, budget: int) -> Infeasible:
    """The error that says whose bytes they are, and what would make them fewer. least: what holds least of all tried."""
    found, smallest = account(least), state_bytes + others + least.peak
    at = max(found.forward, found.backward, key=lambda each: sum(each.parts.values()))
    parts = {"parameters and optimizer state": state_bytes, "saved by other graphs of the step": others, **at.parts}
    told = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts.items() if nbytes)
    fewer = ("more devices, which store parameters in parts" if 2 * state_bytes > smallest else
             "fewer rows, or more devices which share them")
    error = Infeasible(f"a step holds {format_bytes(smallest)} at least, whatever is computed once more, and the budget is "
                       f"{format_bytes(budget)}; when {at.name} runs: {told}", WHERE, f"give {smallest} bytes, or {fewer}")
    error.smallest_budget_bytes = smallest
    return error


def note_kept(kept: KeptNodes) -> None:
    """What this graph keeps counts for those that are compiled after it."""
    session.current().saved_bytes[compat.frame_being_compiled()] = kept.saved_bytes


def kept_plan(kept: KeptNodes, options: Options) -> KeptPlan:
    """The decision as part of a plan."""
    assert options.memory_budget is not None, "there is a budget"
    account = kept.account
    forward, backward = (
        FullestMoment(node=each.name, block=each.block, again=each.again, parts=dict(each.parts))
        for each in (account.forward, account.backward))
    return KeptPlan(
        budget_bytes=options.memory_budget, saved_bytes=kept.saved_bytes, gradient_bytes=account.gradient_bytes,
        saved={name: KeptValue(block=block, bytes=nbytes) for name, block, nbytes in account.saved},
        offloaded={name: OffloadedValue(block=block, bytes=nbytes, predicted_us=us)
                   for name, block, nbytes, us in account.offloaded},
        again={name: CallAgain(block=block, predicted_us=us) for name, block, us in account.again},
        forward=forward, backward=backward)
