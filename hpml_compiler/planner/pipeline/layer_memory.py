"""Memory of the stages of a deep model, from the storage programs of its pieces.

Each piece (`hpml_compiler.planner.pipeline.layer_costs`) is counted once. A stage runs its pieces one after another: while one
runs, those before it hold what they save, and in backward those after it have made gradients.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from hpml_compiler.planner.checkpointing.rank_sweeps import MOST_SWEEPS
from hpml_compiler.planner.graph.memory_budget import BudgetShare, GraphMemory
from hpml_compiler.planner.pipeline.layer_checkpointing import (
    LaterBytes,
    PieceProblems,
    Pieces,
    Run,
    SavedValues,
    decision_of_pieces,
    halved,
)
from hpml_compiler.planner.pipeline.layer_costs import LayerCosts
from hpml_compiler.planner.pipeline.stage_checkpointing import StageCheckpointing, stage_bytes
from hpml_compiler.planner.pipeline.stage_halves import base_names, counted_stage
from hpml_compiler.planner.pipeline.stage_memory import Moments, RankMemory, StageBytes, in_flight, sends_on
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.loop_memory import LoopMemory
from passes.checkpointing.solve_checkpointing import decision_of_trace
from passes.graph.fx_nodes import returned_nodes
from passes.graph.module_blocks import assign_blocks
from passes.json_records import FrozenMap
from passes.pipeline.microbatches_in_flight import moments_of
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.simulation.memory.memory_breakdown import MemoryMoment
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import Microbatches, OtherMicrobatches, StorageProgram


@dataclass(frozen=True)
class PieceGraph:
    """joint: graph of a piece, with its storage program, `program`; gradient_bytes: of its parameters."""

    joint: GraphModule
    program: StorageProgram
    gradient_bytes: int
    ends: StageBytes


@dataclass(frozen=True)
class PieceMemory:
    """Memory of one microbatch in a piece. own_bytes: saved, without values that go through all pieces of its list, whose bytes
    are in `through`, by name. gradient_bytes: of its parameters. kept: the decision that saves them, for one copy."""

    own_bytes: int
    through: Mapping[str, int]
    gradient_bytes: int
    ends: StageBytes
    kept: CheckpointDecision


class LayerMemory:
    """found: for the pieces, each in a stage of its own. table: the schedule. stages: pieces of each stage. chosen: under a
    memory budget, the values that each run of a piece saves; without one, torch's partitioner chooses."""

    def __init__(self, found: StageCheckpointing, costs: LayerCosts, table: PipelineSchedule, stages: Sequence[Pieces]):
        self.found, self.costs, self.table = found, costs, table
        self.stages = [halved(pieces) if found.budgeted else pieces for pieces in stages]
        self.at_once, self.blocks = found.step.at_once, assign_blocks(found.step.marked)
        self.chosen: dict[Run, SavedValues] = {}
        self.known: dict[int, PieceGraph] = {}
        self.known_memory: dict[tuple[int, SavedValues], PieceMemory] = {}
        self.known_around: dict[frozenset[tuple[int, int]], LoopMemory] = {}
        self.known_moments: dict[int, Moments] = {}

    def of_all_ranks(self, memory: Sequence[GraphMemory]) -> list[dict[int, CheckpointDecision]]:
        """`decisions` for each rank. Where two ranks of equal stages decide alike, so do those between them, which have no more
        microbatches in flight than the one, and no fewer than the other."""
        found = dict[int, dict[int, CheckpointDecision]]()

        def fill(first: int, last: int) -> None:
            for rank in (first, last):
                if rank not in found:
                    found[rank] = self.decisions(rank, memory[rank])
            between, middle = range(first + 1, last), (first + last) // 2
            if between and self._alike(first, last):
                found.update((rank, self.decisions(rank, memory[rank], first)) for rank in between)
            elif between:
                fill(first, middle)
                fill(middle, last)

        fill(0, len(memory) - 1)
        return [found[rank] for rank in range(len(memory))]

    def _alike(self, first: int, last: int) -> bool:
        """True if all ranks from the first to the last have the same pieces, and these two save the same values."""
        pieces = [[self.stages[k] for k in self._stages_of(rank)] for rank in range(first, last + 1)]
        one, other = ([self.chosen.get(run) for run in self._runs(rank)] for rank in (first, last))
        return one == other and all(each == pieces[0] for each in pieces)

    def _stages_of(self, rank: int) -> list[int]:
        return [k for k in range(self.table.stages) if self.table.ranks[k] == rank]

    def _runs(self, rank: int) -> list[Run]:
        return [(k, place) for k in self._stages_of(rank) for place in range(len(self.stages[k]))]

    def decisions(self, rank: int, memory: GraphMemory, like: int | None = None) -> dict[int, CheckpointDecision]:
        """Decisions for the stages of a rank, by stage, whether they fit or not. memory: of the rank besides what its stages
        save. like: a rank whose decisions are taken, if they fit."""
        own = self._stages_of(rank)
        found, share, around = self.found, self.found.sharing.share_of(memory), self._around(own)
        of_rank = RankMemory(self._moments_of(rank), {k: self._stage_bytes(k) for k in own})
        if found.budgeted and like is not None:
            self.chosen.update((run, self.chosen[its]) for run, its in zip(self._runs(rank), self._runs(like), strict=True))
            counted = self._counted(own, of_rank, share, around)
            if all(each.fits for each in counted.values()):
                return counted
        if found.budgeted:
            problems = PieceProblems(
                {k: self.stages[k] for k in own}, of_rank, share, around, self._joint, self._later,
                found.sharing.replicated.name, found.options, found.allowance)

            def fits(chosen: Mapping[Run, SavedValues]) -> bool:
                self.chosen.update(chosen)
                return all(each.fits for each in self._counted(own, of_rank, share, around).values())

            problems.decided(MOST_SWEEPS, fits)
        return self._counted(own, of_rank, share, around)

    def _counted(self, own: Sequence[int], of_rank: RankMemory, share: BudgetShare,
                 around: LoopMemory) -> dict[int, CheckpointDecision]:
        """The decisions for these stages of a rank, with their memory."""
        saved, found = {k: self._saved_bytes(k) for k in own}, {}
        for k in own:
            others = of_rank.others(k, saved)
            count = in_flight(k, of_rank.moments, of_rank.stages[k].waits)
            loop = replace(around, others=Microbatches((OtherMicrobatches(count - 1),)))
            found[k] = loop.of_step(self._decision(k, others, saved[k], share.available), share.available, share.after)
        return found

    def in_flight(self, stage: int) -> int:
        """Most microbatches of a stage that have saved values at a time."""
        return in_flight(stage, self._moments_of(self.table.ranks[stage]), self._stage_bytes(stage).waits)

    def _moments_of(self, rank: int) -> Moments:
        if rank not in self.known_moments:
            self.known_moments[rank] = moments_of(self.table, rank, self.at_once)
        return self.known_moments[rank]

    def _decision(self, k: int, others: Microbatches, saved: int, left: float) -> CheckpointDecision:
        forward, backward = (_fullest(self._moments(k, phase), others.others(phase, saved), saved) for phase in (False, True))
        return decision_of_pieces([(own.kept, count) for own, count in self._memories(k)], forward, backward, saved, left)

    def _moments(self, stage: int, backward: bool) -> Iterator[MemoryMoment]:
        """The peaks of the pieces of a stage, where they run first and last."""
        copies = [(own, k in (0, count - 1)) for own, count in self._memories(stage) for k in range(count)]
        splits = self.table.splits_backward and not copies[0][0].ends.waits
        saved = late = 0
        gradients = sum(own.gradient_bytes for own, _ in copies)
        waiting = sum(own.ends.late for own, _ in copies)
        for own, is_end in copies:
            gradients -= own.gradient_bytes
            waiting -= own.ends.late
            if not is_end:
                pass
            elif not backward:
                yield _with(own.kept.account.forward, saved, 0)
            elif not splits:
                yield _with(own.kept.account.backward, saved, gradients)
            else:  # gradients of activations in all pieces, then those of weights
                yield _with(own.kept.account.backward, saved + waiting, 0)
                yield _with(own.kept.account.backward, late, gradients)
            saved += own.own_bytes
            late += own.ends.late

    def _saved_bytes(self, stage: int) -> int:
        """Bytes that one microbatch saves in a stage."""
        through: dict[str, int] = {}
        for own, _ in self._memories(stage):
            through.update(own.through)
        return sum(count * own.own_bytes for own, count in self._memories(stage)) + sum(through.values())

    def _stage_bytes(self, k: int) -> StageBytes:
        pieces = [(self._graph(piece).ends, count) for piece, count in self.stages[k]]
        (first, _), (last, _) = pieces[0], pieces[-1]
        late = last.received_back if first.waits else sum(own.late * count for own, count in pieces)
        sent, sent_back = (last.sent if sends_on(self.table, k) else 0), (first.sent_back if sends_on(self.table, k - 1) else 0)
        return StageBytes(first.received, last.received_back, sent, sent_back, late,
                          sum(own.gradients * count for own, count in pieces), first.waits)

    def _around(self, own: Sequence[int]) -> LoopMemory:
        """Memory around the loop on a rank with these stages."""
        counts = Counter[int]()
        for k in own:
            for piece, count in self.stages[k]:
                counts[piece] += count
        key = frozenset(counts.items())
        if key not in self.known_around:
            found, lists = self.found, self.costs.lists
            layers = {f"{path}.1": counts[self.costs.pieces.layer(number)] for number, path in enumerate(lists)}

            def copies(node: Node) -> int:
                return max(layers.get(self.blocks.get(node, ""), 1), 1)

            table = piece_table(self.table, [int(piece not in counts) for piece in range(found.step.table.stages)])
            alone = StageCheckpointing(replace(found.step, table=table), found.sharing, found.builder, found.parameters)
            self.known_around[key] = alone.around(0, copies)
        return self.known_around[key]

    def _joint(self, piece: int) -> tuple[GraphModule, int]:
        return self._graph(piece).joint, self.costs.staged.graphs[piece].forward_outputs

    def _later(self, piece: int) -> LaterBytes:
        found = self._graph(piece)
        return LaterBytes(found.gradient_bytes, self.table.splits_backward * found.ends.late)

    def _graph(self, piece: int) -> PieceGraph:
        if piece not in self.known:
            found, costs, graph = self.found, self.costs, self.costs.staged.graphs[piece]
            joint = counted_stage(graph, costs.compiler, costs.splits_backward, found.builder_of(piece))
            program = read(STORAGE_PROGRAM, joint)
            sent = [node.name for node in returned_nodes(joint)[-len(graph.own_sent_back):] if node is not None]
            sent_names = base_names(joint, sent if graph.own_sent_back else ())
            sent_back = {s for s, storage in enumerate(program.storages) if storage.name in sent_names}
            self.known[piece] = PieceGraph(joint, program, program.bytes_of(program.gradients - sent_back),
                                           stage_bytes(found.step, piece, joint))
        return self.known[piece]

    def _memories(self, stage: int) -> list[tuple[PieceMemory, int]]:
        """Memory of the pieces of a stage in order, each with how often it is there."""
        return [(self._memory(piece, self.chosen.get((stage, place))), count)
                for place, (piece, count) in enumerate(self.stages[stage])]

    def _memory(self, piece: int, chosen: SavedValues | None) -> PieceMemory:
        graph = self._graph(piece)
        if chosen is None:
            chosen = SavedValues(base_names(graph.joint, self.costs.halves(piece).saved))
        if (piece, chosen) not in self.known_memory:
            self.known_memory[piece, chosen] = self._memory_of(graph, piece, chosen)
        return self.known_memory[piece, chosen]

    def _memory_of(self, found: PieceGraph, piece: int, chosen: SavedValues) -> PieceMemory:
        program, graphs = found.program, self.costs.staged.graphs
        saved, offloaded = ([s for s in program.candidates if program.storages[s].name in names]
                            for names in (chosen.names - chosen.offloaded, chosen.offloaded))
        kept = replace(decision_of_trace(simulate_memory(program, saved, offloaded), 0.0, 0.0), ahead=chosen.ahead)
        further = graphs[piece + 1].received if piece + 1 < len(graphs) else ()
        through = {name: nbytes for name, _, nbytes in kept.account.saved
                   if name in graphs[piece].received and name in further}
        own = sum(nbytes for _, _, nbytes in kept.account.saved)
        return PieceMemory(own - sum(through.values()), through, found.gradient_bytes, found.ends, kept)


def piece_table(table: PipelineSchedule, ranks: Sequence[int]) -> PipelineSchedule:
    """A schedule for pieces in place of stages, of which only the kind counts. ranks: of each piece."""
    return replace(table, ranks=tuple(ranks), actions=(table.actions[0], *((),) * max(ranks)))


def _fullest(moments: Iterator[MemoryMoment], others: OtherMicrobatches, saved: int) -> MemoryMoment:
    moment = max(moments, key=lambda each: each.nbytes)
    return _with(moment, others.in_flight * saved + others.saved_bytes, others.gradient_bytes)


def _with(moment: MemoryMoment, saved: int, gradients: int) -> MemoryMoment:
    parts = Counter({"saved": saved, "gradients": gradients})
    parts.update(moment.parts)
    return replace(moment, parts=FrozenMap({part: nbytes for part, nbytes in parts.items() if nbytes}))
