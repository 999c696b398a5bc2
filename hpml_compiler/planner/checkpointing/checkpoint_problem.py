"""Checkpointing problem of one graph: its storage program and its share of the memory budget."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from torch.fx import GraphModule, Node

from hpml_compiler.options import Options
from hpml_compiler.planner.checkpointing.checkpointing_choice import WHERE, apply_checkpointing_plan, choose_checkpointing
from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace, layers_of
from hpml_compiler.planner.graph.memory_budget import BudgetShare
from hpml_compiler.planner.graph.microbatching import loss_of
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.visualize.formatting import format_bytes
from passes.analyses.storage_program_builder import BuildStorageProgram
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import CHECKPOINT_DECISION, STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.layers.layer_folding import middle_layers
from passes.checkpointing.loop_memory import LoopMemory, loop_memory
from passes.checkpointing.obey_checkpointing import ObeyCheckpointing
from passes.checkpointing.solve_checkpointing import decision_of_trace
from passes.errors import Infeasible
from passes.graph.graph_copy import copy_graph
from passes.graph.graph_signature import input_position
from passes.graph.loops.loop_parts import LoopSplit
from passes.graph.module_blocks import assign_blocks
from passes.presets import building_storage_program, obeying_checkpointing
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import StorageProgram
from passes.solver.work_limit import WorkLimit

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointProblem:
    """gm: a joint graph with its storage program: a full graph or, if there is a `loop`, the body that each microbatch runs.
    forward_outputs: number of its outputs that are forward's. share: budget share of the full graph. name: of the graph."""

    gm: GraphModule
    forward_outputs: int
    share: BudgetShare
    name: str
    loop: LoopMemory | None = None

    def solved(self, options: Options, strict: bool, allowance: WorkLimit | None = None) -> CheckpointDecision:
        """Choose what to save in the least time within the budget share. strict: raise Infeasible if nothing fits; otherwise
        return the choice with the lowest peak. allowance: replaces the options' time limit."""
        def chosen(strict: bool) -> CheckpointDecision:
            made = choose_checkpointing(self.gm, self.forward_outputs, self._share_of_gm, options, self.name, strict, allowance)
            return self._of_step(made)

        try:
            kept = chosen(strict)
        except Infeasible as error:
            outside = None if self.loop is None else self._too_small(chosen(False))
            if outside is not None and (outside.smallest_budget_bytes or 0) > (error.smallest_budget_bytes or 0):
                raise outside from None  # what fits into the loop would be refused for what is around it
            raise
        if strict and not kept.fits:
            raise self._too_small(kept)
        return kept

    @property
    def is_hopeless(self) -> bool:
        """True if what is around the loop leaves nothing to it, so that no choice fits."""
        return self._share_of_gm.available <= 0

    def obeyed(self, pinned: CheckpointingPlan) -> CheckpointDecision | None:
        """Apply the choice of a saved plan. None if it was made for another budget and exceeds this one. Raises BadInput if it
        does not match the graph."""
        kept = apply_checkpointing_plan(self.gm, self._share_of_gm, pinned, self.name)
        return None if kept is None else self._of_step(kept)

    def recounted(self, kept: CheckpointDecision) -> CheckpointDecision:
        """A decision made for this graph, with the bytes of this problem."""
        share = self._share_of_gm
        obeying_checkpointing(ObeyCheckpointing(kept.names, kept.offloaded, share.available, round(share.after)))(self.gm)
        return self._of_step(read(CHECKPOINT_DECISION, self.gm))

    def counted(self, names: Collection[str]) -> CheckpointDecision:
        """The decision to save these values, and others that backward needs and nothing recomputes, whether it fits or not."""
        share = self._share_of_gm
        program = replace(read(STORAGE_PROGRAM, self.gm), after_bytes=round(share.after))
        kept = [s for s in program.candidates if program.storages[s].name in names]
        return self._of_step(decision_of_trace(simulate_memory(program, kept), share.available, 0.0))

    @property
    def _share_of_gm(self) -> BudgetShare:
        """Budget share of `gm`; for a loop body, without the memory in use around the loop and without the optimizer step."""
        if self.loop is None:
            return self.share
        between = self.share.between if self.loop.others.in_flight > 1 else 0.0
        return replace(self.share, available=self.share.available - self.loop.around, between=between, after=0.0,
                       around_loop=self.loop.around)

    def _of_step(self, kept: CheckpointDecision) -> CheckpointDecision:
        return kept if self.loop is None else self.loop.of_step(kept, self.share.available, self.share.after)

    def _too_small(self, kept: CheckpointDecision) -> Infeasible:
        """The error for a step whose peak lies outside the loop, where checkpointing does not help."""
        least = round(self.share.budget - self.share.available + kept.peak_bytes)
        error = Infeasible(
            f"{self.name}: the step needs at least {format_bytes(least)} outside its microbatch loop, more than the budget of "
            f"{format_bytes(self.share.budget)}", WHERE,
            f"set memory_budget to {least} bytes, or use more devices to shard parameters over")
        error.smallest_budget_bytes = least
        return error


def equal_shares(units: Iterable[T], problem_of: Callable[[T], CheckpointProblem], options: Options) -> dict[T, int]:
    """Bytes that one microbatch saves in each of several loop bodies of a rank, if all save the same part of what costs no time
    to save. problem_of: the problem of each, as if the others saved nothing."""
    found, peaks, total, left = dict[T, int](), [], 0, 0.0
    for unit in units:
        problem = problem_of(unit)
        assert problem.loop is not None, "it is the body of a loop"
        kept = replace(problem, share=replace(problem.share, available=float("inf"))).solved(options, False)
        found[unit] = kept.saved_bytes // problem.loop.others.in_flight
        peaks.append(kept.peak_bytes - kept.saved_bytes)
        total, left = total + kept.saved_bytes, problem.share.available
    share = min(max((left - max(peaks)) / total, 0.0), 1.0) if total else 1.0
    return {unit: round(share * nbytes) for unit, nbytes in found.items()}


def problem_of_loop(marked: GraphModule, loop: LoopSplit, microbatches: int, builder: BuildStorageProgram, share: BudgetShare,
                    name: str, folded: FewLayerTrace | None = None) -> CheckpointProblem:
    """The problem of a step in microbatches. marked: the graph that the loop was cut out of; the loop's body gets its storage
    program. builder: the pass that builds it for the full graph on this mesh. folded: the deeper model of which a few layers
    were traced."""

    around = loop_memory(marked, loop, builder.forward_outputs, microbatches, loss_of(marked) is not None,
                         segment_program_of(builder),
                         _layers(marked, folded))
    building_storage_program(replace(body_builder(marked, loop, builder), microbatches=around.others))(loop.body)
    return CheckpointProblem(loop.body, len(loop.forward), share, name, around)


def segment_program_of(builder: BuildStorageProgram) -> Callable[[GraphModule, int], StorageProgram]:
    """Builds the storage program of a graph around the loop, with so many outputs."""

    def program_of(gm: GraphModule, outputs: int) -> StorageProgram:
        gm = copy_graph(gm)
        building_storage_program(replace(builder, forward_outputs=outputs, written=frozenset(), lists=(), layers=0))(gm)
        return read(STORAGE_PROGRAM, gm)

    return program_of


def body_builder(marked: GraphModule, loop: LoopSplit, builder: BuildStorageProgram) -> BuildStorageProgram:
    """The pass that builds the storage program of a loop's body, without the memory of other microbatches."""
    written = {node.name for k, node in enumerate(marked.graph.find_nodes(op="placeholder"))
               if input_position(node, k) in builder.written}
    placeholders = loop.body.graph.find_nodes(op="placeholder")
    in_body = frozenset(node.name for node, each in zip(placeholders, loop.reads) if each.name in written)
    return replace(builder, forward_outputs=len(loop.forward), written=in_body)


def _layers(marked: GraphModule, folded: FewLayerTrace | None) -> Callable[[Node], int]:
    """Number of nodes of the model that a traced node stands for, as in `passes.checkpointing.layers.layer_folding`."""
    lists, layers = layers_of(folded)
    several = {block: count for blocks in lists for block, count in zip(blocks[1:3], middle_layers(layers), strict=True)}
    blocks = assign_blocks(marked) if several else {}
    return lambda node: several.get(blocks.get(node, ""), 1)
