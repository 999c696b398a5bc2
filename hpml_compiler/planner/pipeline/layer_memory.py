"""Memory of the stages of a deep model, from the storage programs of its pieces.

Each piece (`hpml_compiler.planner.pipeline.layer_costs`) is counted once. A stage runs its pieces one after another: while one
runs, those before it hold what they save, and in backward those after it have made gradients.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from hpml_compiler.planner.graph.memory_budget import GraphMemory
from hpml_compiler.planner.pipeline.layer_costs import LayerCosts
from hpml_compiler.planner.pipeline.stage_checkpointing import StageCheckpointing, stage_bytes
from hpml_compiler.planner.pipeline.stage_halves import base_names, counted_stage
from hpml_compiler.planner.pipeline.stage_memory import RankMemory, StageBytes, in_flight, sends_on
from passes.annotations import read
from passes.checkpointing.checkpoint_keys import STORAGE_PROGRAM, CheckpointDecision
from passes.checkpointing.loop_memory import LoopMemory
from passes.graph.fx_nodes import returned_nodes
from passes.graph.module_blocks import assign_blocks
from passes.json_records import FrozenMap
from passes.pipeline.microbatches_in_flight import moments_of
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.simulation.memory.memory_breakdown import MemoryMoment, MemoryReport, report_memory
from passes.simulation.memory.memory_trace import simulate_memory
from passes.simulation.memory.storage_program import Microbatches, OtherMicrobatches

Pieces = Sequence[tuple[int, int]]
"""Pieces of a stage in order, each with how often it is there."""


@dataclass(frozen=True)
class PieceMemory:
    """Memory of one microbatch in a piece. own_bytes: saved, without values that go through all pieces of its list, whose bytes
    are in `through`, by name. gradient_bytes: of its parameters. report: of its memory trace."""

    own_bytes: int
    through: Mapping[str, int]
    gradient_bytes: int
    ends: StageBytes
    report: MemoryReport


class LayerMemory:
    """found: for the pieces, each in a stage of its own. table: the schedule. stages: pieces of each stage."""

    def __init__(self, found: StageCheckpointing, costs: LayerCosts, table: PipelineSchedule, stages: Sequence[Pieces]):
        self.found, self.costs, self.table, self.stages = found, costs, table, stages
        self.at_once, self.blocks = found.step.at_once, assign_blocks(found.step.marked)
        self.known: dict[int, PieceMemory] = {}
        self.known_around: dict[frozenset[tuple[int, int]], LoopMemory] = {}

    def decisions(self, rank: int, memory: GraphMemory) -> dict[int, CheckpointDecision]:
        """Decisions for the stages of a rank, by stage. memory: of the rank besides what its stages save."""
        own = [k for k in range(self.table.stages) if self.table.ranks[k] == rank]
        share, around = self.found.sharing.share_of(memory), self._around(own)
        moments = moments_of(self.table, rank, self.at_once)
        of_rank = RankMemory(moments, {k: self._stage_bytes(k) for k in own})
        saved = {k: self._saved_bytes(self.stages[k]) for k in own}
        found = {}
        for k in own:
            others = of_rank.others(k, saved)
            count = in_flight(k, moments, of_rank.stages[k].waits)
            loop = replace(around, others=Microbatches((OtherMicrobatches(count - 1),)))
            found[k] = loop.of_step(self._decision(k, others, saved[k], share.available), share.available, share.after)
        return found

    def in_flight(self, stage: int) -> int:
        """Most microbatches of a stage that have saved values at a time."""
        moments = moments_of(self.table, self.table.ranks[stage], self.at_once)
        return in_flight(stage, moments, self._stage_bytes(stage).waits)

    def _decision(self, k: int, others: Microbatches, saved: int, left: float) -> CheckpointDecision:
        forward, backward = (_fullest(self._moments(self.stages[k], phase), others.others(phase, saved), saved)
                             for phase in (False, True))
        names, layers = [], Counter[str]()
        for piece, count in self.stages[k]:
            names += self._memory(piece).report.saved
            layers.update({name: count for name, _, _ in self._memory(piece).report.saved})
        account = MemoryReport((forward,), (backward,), tuple(dict.fromkeys(names)),
                               layers=FrozenMap({name: count for name, count in layers.items() if count > 1}))
        return CheckpointDecision(frozenset(layers), 0, 0.0, forward.nbytes, backward.nbytes, saved, left, 0.0, account=account)

    def _moments(self, pieces: Pieces, backward: bool) -> Iterator[MemoryMoment]:
        """The peaks of the pieces of a stage, where they run first and last."""
        copies = [(self._memory(piece), k in (0, count - 1)) for piece, count in pieces for k in range(count)]
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
                yield _with(own.report.forward, saved, 0)
            elif not splits:
                yield _with(own.report.backward, saved, gradients)
            else:  # gradients of activations in all pieces, then those of weights
                yield _with(own.report.backward, saved + waiting, 0)
                yield _with(own.report.backward, late, gradients)
            saved += own.own_bytes
            late += own.ends.late

    def _saved_bytes(self, pieces: Pieces) -> int:
        """Bytes that one microbatch saves in a stage."""
        through: dict[str, int] = {}
        for piece, _ in pieces:
            through.update(self._memory(piece).through)
        return sum(count * self._memory(piece).own_bytes for piece, count in pieces) + sum(through.values())

    def _stage_bytes(self, k: int) -> StageBytes:
        pieces = [(self._memory(piece).ends, count) for piece, count in self.stages[k]]
        (first, _), (last, _) = pieces[0], pieces[-1]
        late = last.received_back if first.waits else sum(own.late * count for own, count in pieces)
        return StageBytes(first.received, last.received_back, last.sent if sends_on(self.table, k) else 0, late,
                          sum(own.gradients * count for own, count in pieces), first.waits)

    def _around(self, own: Sequence[int]) -> LoopMemory:
        """Memory around the loop on a rank with these stages."""
        counts = Counter[int]()
        for k in own:
            counts.update(dict(self.stages[k]))
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

    def _memory(self, piece: int) -> PieceMemory:
        if piece not in self.known:
            self.known[piece] = self._counted(piece)
        return self.known[piece]

    def _counted(self, piece: int) -> PieceMemory:
        found, costs, graph = self.found, self.costs, self.costs.staged.graphs[piece]
        joint = counted_stage(graph, costs.compiler, costs.splits_backward, found.builder_of(piece))
        program, names = read(STORAGE_PROGRAM, joint), base_names(joint, costs.halves(piece).saved)
        trace = simulate_memory(program, [s for s in program.candidates if program.storages[s].name in names])
        graphs = costs.staged.graphs
        further = graphs[piece + 1].received if piece + 1 < len(graphs) else ()
        through = {program.storages[s].name: program.storages[s].nbytes for s in trace.saved
                   if program.storages[s].name in graph.received and program.storages[s].name in further}
        sent = [node.name for node in returned_nodes(joint)[-len(graph.own_sent_back):] if node is not None]
        sent_names = base_names(joint, sent if graph.own_sent_back else ())
        sent_back = {s for s, storage in enumerate(program.storages) if storage.name in sent_names}
        return PieceMemory(program.bytes_of(trace.saved) - sum(through.values()), through,
                           program.bytes_of(program.gradients - sent_back), stage_bytes(found.step, piece, joint),
                           report_memory(trace))


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
