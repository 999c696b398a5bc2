"""Choose which activations to save under a memory budget, and record the choice in the plan."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_cache import cached_checkpointing
from hpml_compiler.planner.graph.graph_planning import solver_options
from hpml_compiler.planner.graph.memory_budget import NO_LIMIT, BudgetShare
from hpml_compiler.plans.checkpointing_records import (
    CheckpointingPlan,
    OffloadedValue,
    PeakRecord,
    PhaseMemory,
    RecomputedCall,
    SavedValue,
)
from hpml_compiler.plans.peak_memory import counted_peak
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.visualize.formatting import format_bytes, format_us
from passes.annotations import has, read
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION, PARTITIONER_CHOICE, CheckpointDecision
from passes.checkpointing.checkpoint_search import BudgetTooSmall
from passes.checkpointing.obey_checkpointing import ObeyCheckpointing
from passes.checkpointing.solve_checkpointing import SolveCheckpointing
from passes.errors import BadInput, Infeasible
from passes.presets import obeying_checkpointing, solving_checkpointing
from passes.simulation.memory.memory_breakdown import MemoryMoment, MemoryReport, report_memory
from passes.simulation.memory.memory_trace import MemoryTrace
from passes.solver.work_limit import WorkLimit

log = logging.getLogger("hpml")
WHERE = "options['memory_budget']"


def choose_checkpointing(joint: GraphModule, forward_outputs: int, share: BudgetShare, options: Options, name: str,
                         strict: bool,
                         allowance: WorkLimit | None = None) -> CheckpointDecision:
    """Choose for a graph that has its storage program. strict: raise Infeasible where the budget cannot be met; otherwise
    return the choice with the lowest peak. allowance: replaces the options' time limit."""
    within = allowance or WorkLimit(options.time_limit)
    kept = cached_checkpointing(
        joint, share, options, strict, lambda: _decided(joint, forward_outputs, share, options, strict, within))
    log.info("%s: %d values are saved for backward, %d calls are recomputed (%s); peak memory is %s plus %s of parameters "
             "and optimizer state", name, len(kept.names), kept.recomputed, format_us(kept.recompute_us),
             format_bytes(kept.peak_bytes),
             format_bytes(share.state))
    if kept.offloaded:
        log.info("%s: %d of the saved values (%s) are offloaded (%s)", name, len(kept.offloaded),
                 format_bytes(kept.offloaded_bytes),
                 format_us(kept.offload_us))
    return kept


def _decided(joint: GraphModule, forward_outputs: int, share: BudgetShare, options: Options, strict: bool, allowance: WorkLimit,
             ) -> CheckpointDecision:
    keep = SolveCheckpointing(share.available, solver_options(options), strict, after_bytes=round(share.after),
                              allowance=allowance,
                              alike=options.compile_blocks == "on")
    try:
        try:  # the graph leaves memory to graphs after it; without any, the second attempt would repeat the first
            between = round(share.between)
            first = replace(keep, strict=strict or between > 0, between_bytes=between)
            solving_checkpointing(forward_outputs, first, has(PARTITIONER_CHOICE, joint))(joint)
        except BudgetTooSmall:  # leave nothing to graphs after it; these raise an error if they do not fit
            if not share.between:
                raise
            solving_checkpointing(forward_outputs, keep, has(PARTITIONER_CHOICE, joint))(joint)
    except BudgetTooSmall as error:
        assert error.walk is not None, "the error has the trace with the lowest peak"
        raise _too_small(error.walk, share, options) from None
    return read(CHECKPOINT_DECISION, joint)


def apply_checkpointing_plan(joint: GraphModule, share: BudgetShare, pinned: CheckpointingPlan,
                             name: str) -> CheckpointDecision | None:
    """Apply the checkpointing plan of a saved plan to a graph that has its storage program; None where it was made for another
    budget and exceeds this one. Raises BadInput where it cannot be applied."""
    obeying_checkpointing(ObeyCheckpointing(frozenset({*pinned.saved, *pinned.offloaded}), frozenset(pinned.offloaded),
                                            share.available,
                                            round(share.after)))(joint)
    kept = read(CHECKPOINT_DECISION, joint)
    held = format_bytes(share.budget - share.available + kept.peak_bytes)
    if kept.fits:
        log.info("%s: %d values are saved for backward, as in the given plan; peak memory of the step is %s", name,
                 len(kept.names), held)
        return kept
    if share.budget == pinned.budget_bytes:
        raise BadInput(f"with the saved activations of the given plan the step needs {held}, more than its budget of "
                       f"{format_bytes(share.budget)}", "options['plan']",
                       "make the plan again with the optimizer and the graphs of this step")
    log.warning("%s: with the saved activations of the given plan the step needs %s, more than the budget of %s: hpml decides "
                "them again", name, held,
                format_bytes(share.budget))
    return None


def _too_small(least: MemoryTrace, share: BudgetShare, options: Options) -> Infeasible:
    """The error for a budget that is too small, with bytes by part and remedies. least: the trace with the lowest peak."""
    smallest = round(share.budget - share.available + least.peak)
    when, parts = _fullest(least, share)
    told = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts.items() if nbytes)
    fewer = ("use more devices to shard parameters over" if 2 * share.state > smallest else
             "use fewer rows or more devices")
    remedies = [f"{share.remedy} (the optimizer)"] if share.transient and least.after == least.peak and share.remedy else []
    remedies += [f"set memory_budget to {smallest} bytes", fewer]
    if share.others:
        remedies.append("remove the graph break, so that these graphs are planned together")
    if not options.offloads("saved"):
        remedies.append('set offload="saved"')
    if 2 * share.state > smallest and options.optimizer_states and not options.offloads("optimizer"):
        remedies.append('set offload="optimizer"')
    offloaded = " or offloaded" if options.offloads("saved") else ""
    error = Infeasible(
        f"the step needs at least {format_bytes(smallest)}, whatever is recomputed{offloaded}, more than the budget of "
        f"{format_bytes(share.budget)}; at the peak, when {when}: {told}", WHERE, ", or ".join(remedies))
    error.smallest_budget_bytes = smallest
    return error


def _fullest(walk: MemoryTrace, share: BudgetShare) -> tuple[str, dict[str, float]]:
    """The moment of the peak, and bytes by part."""
    parts = {"parameters and optimizer state": share.state - share.copies, "copies of these": share.copies,
             "gradients of other graphs of the step": share.later, "around the microbatch loop": share.around_loop}
    if walk.after == walk.peak:
        own = walk.program.bytes_of(walk.program.gradients)
        return "the optimizer steps", {**parts, "gradients": own, "temporary tensors": share.transient}
    found = report_memory(walk)
    at = max(found.forward, found.backward, key=lambda each: sum(each.parts.values()))
    others = {f"saved by {name} (another graph of the step)": nbytes for name, nbytes in share.others.items()}
    return f"{at.name} runs", {**parts, **others, **at.parts}


def with_checkpointing(record: GraphPlan, kept: CheckpointDecision, options: Options) -> GraphPlan:
    """The graph's plan with its checkpointing, including the time this takes and the memory it needs."""
    said, before = checkpointing_plan(kept, options), record.predicted
    again_us = said.again_us + said.offload_us
    record = record.model_copy(update={"kept": said, "predicted": before.model_copy(update={
        "again_us": again_us, "step_time_us": before.step_time_us - before.again_us + again_us})})
    peak = counted_peak([record])
    assert peak is not None, "the record has a checkpointing plan"
    memory = record.memory.model_copy(update={"activations": kept.saved_bytes, "peak": peak.bytes})
    return record.model_copy(update={"memory": memory, "at_peak": peak})


def checkpointing_plan(kept: CheckpointDecision, options: Options) -> CheckpointingPlan:
    """A checkpointing decision as a plan records it. options: with the budget in bytes, or `NO_LIMIT`."""
    assert isinstance(options.memory_budget, int), "in bytes"
    if options.memory_budget == NO_LIMIT:
        return _partitioned_plan(kept)
    account, layers = kept.account, kept.account.layers
    return CheckpointingPlan(
        budget_bytes=options.memory_budget, saved_bytes=kept.saved_bytes, gradient_bytes=account.gradient_bytes,
        step_bytes=max(round(kept.after_bytes + options.memory_budget - kept.budget_bytes), 0),
        saved=_saved(account),
        offloaded={name: OffloadedValue(block=block, bytes=nbytes, predicted_us=us, layers=layers.get(name, 1))
                   for name, block, nbytes, us in account.offloaded},
        again={name: RecomputedCall(block=block, predicted_us=us, layers=layers.get(name, 1)) for name, block,
               us in account.again},
        forward=_peak(account.forward), backward=_peak(account.backward), forward_memory=_phase_memory(account.forward_moments),
        backward_memory=_phase_memory(account.backward_moments), ahead=kept.ahead)


def _partitioned_plan(kept: CheckpointDecision) -> CheckpointingPlan:
    """Without a budget. Torch's partitioner recomputes what costs next to nothing, and no time is predicted for it."""
    account = kept.account
    return CheckpointingPlan(
        saved_bytes=kept.saved_bytes, gradient_bytes=account.gradient_bytes,
        step_bytes=max(round(kept.after_bytes + NO_LIMIT - kept.budget_bytes), 0), saved=_saved(account), again={},
        forward=_peak(account.forward), backward=_peak(account.backward))


def _saved(account: MemoryReport) -> dict[str, SavedValue]:
    return {name: SavedValue(block=block, bytes=nbytes, layers=account.layers.get(name, 1))
            for name, block, nbytes in account.saved}


def _peak(moment: MemoryMoment) -> PeakRecord:
    return PeakRecord(node=moment.name, block=moment.block, again=moment.again, parts=dict(moment.parts))


def _phase_memory(moments: Sequence[MemoryMoment]) -> PhaseMemory:
    parts = dict.fromkeys(part for each in moments for part in each.parts)
    return PhaseMemory(nodes=tuple(each.name for each in moments),
                       parts={part: tuple(each.parts.get(part, 0) for each in moments) for part in parts})
