"""Which values a graph saves for backward, as a problem to solve: its tape, in the bytes that its step leaves to it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.loop_memory import LoopMemory, loop_memory
from passes.errors import Infeasible
from passes.graph.graph_copy import copy_graph
from passes.graph.graph_signature import input_position
from passes.graph.loops.loop_parts import LoopSplit
from passes.graph.module_blocks import assign_blocks
from passes.presets import building_storage_program
from passes.simulation.memory.storage_program import StorageProgram
from passes.solver.work_limit import WorkLimit


@dataclass(frozen=True)
class CheckpointProblem:
    """gm: a joint graph with its tape, of whose outputs so many are forward's: a whole graph or, where there is a `loop`, the
    body that each microbatch runs. room: what the step leaves to the whole graph. name: of the graph."""

    gm: GraphModule
    forward_outputs: int
    room: BudgetShare
    name: str
    loop: LoopMemory | None = None

    def solved(self, options: Options, strict: bool, allowance: WorkLimit | None = None) -> CheckpointDecision:
        """The least time within the room. strict: raise Infeasible where nothing fits; else the answer holds least.
        allowance: in place of the options' time limit."""
        kept = choose_checkpointing(self.gm, self.forward_outputs, self._room_of_gm, options, self.name, strict, allowance)
        kept = self._of_step(kept)
        if strict and not kept.fits:
            raise self._too_small(kept)
        return kept

    def obeyed(self, pinned: CheckpointingPlan) -> CheckpointDecision | None:
        """What a plan saves; None where it was made for another budget and does not fit this one. Raises BadInput where it
        cannot be obeyed."""
        kept = apply_checkpointing_plan(self.gm, self._room_of_gm, pinned, self.name)
        return None if kept is None else self._of_step(kept)

    @property
    def _room_of_gm(self) -> BudgetShare:
        """The body of a loop has what is left by that which is around it, and hands its gradients to nobody but the loop."""
        if self.loop is None:
            return self.room
        between = self.room.between if self.loop.others.in_flight > 1 else 0.0
        return replace(self.room, left=self.room.left - self.loop.around, between=between, after=0.0)

    def _of_step(self, kept: CheckpointDecision) -> CheckpointDecision:
        return kept if self.loop is None else self.loop.of_step(kept, self.room.left, self.room.after)

    def _too_small(self, kept: CheckpointDecision) -> Infeasible:
        """Of a step that is fullest outside of its loop, whatever the body saves."""
        least = round(self.room.budget - self.room.left + kept.peak_bytes)
        error = Infeasible(
            f"{self.name}: a step holds {format_bytes(least)} at least, outside of its loop over microbatches, and the budget "
            f"is {format_bytes(self.room.budget)}", WHERE,
            f"give {least} bytes, or more devices, which store parameters in parts")
        error.smallest_budget_bytes = least
        return error


def problem_of_loop(marked: GraphModule, loop: LoopSplit, microbatches: int, tape: BuildStorageProgram, room: BudgetShare,
                    name: str,
                    folded: FewLayerTrace | None = None) -> CheckpointProblem:
    """Of a step in microbatches. marked: the graph that the loop was cut out of; the loop's body gets its tape. tape: how tapes
    are made on this mesh, for the whole graph. folded: of which deeper model it has a few layers."""
    def tape_of(gm: GraphModule, outputs: int) -> StorageProgram:
        gm = copy_graph(gm)
        building_storage_program(replace(tape, forward_outputs=outputs, written=frozenset(), lists=(), layers=0))(gm)
        return read(STORAGE_PROGRAM, gm)

    around = loop_memory(marked, loop, tape.forward_outputs, microbatches, loss_of(marked) is not None, tape_of,
                         _layers(marked, folded))
    building_storage_program(replace(tape_of_body(marked, loop, tape), microbatches=around.others))(loop.body)
    return CheckpointProblem(loop.body, len(loop.forward), room, name, around)


def tape_of_body(marked: GraphModule, loop: LoopSplit, tape: BuildStorageProgram) -> BuildStorageProgram:
    """How the tape of a loop's body is made, but for what other microbatches hold. See `problem_of_loop`."""
    written = {node.name for k, node in enumerate(marked.graph.find_nodes(op="placeholder"))
               if input_position(node, k) in tape.written}
    placeholders = loop.body.graph.find_nodes(op="placeholder")
    in_body = frozenset(node.name for node, each in zip(placeholders, loop.reads) if each.name in written)
    return replace(tape, forward_outputs=len(loop.forward), written=in_body)


def _layers(marked: GraphModule, folded: FewLayerTrace | None) -> Callable[[Node], int]:
    """How many nodes of the model a node of its traced layers stands for, as `passes.checkpointing.layer_folding` has it."""
    lists, layers = layers_of(folded)
    middle = layers - 2
    several = {block: count for _, one, other, _ in lists
               for block, count in ((one, middle - middle // 2), (other, middle // 2))}
    blocks = assign_blocks(marked) if several else {}
    return lambda node: several.get(blocks.get(node, ""), 1)
