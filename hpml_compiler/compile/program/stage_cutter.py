"""Cut a graph with loop markers into pipeline stages, and make the program of this rank."""
from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile.program.program_builder import stage_program, step_interface
from hpml_compiler.compile.program.step_program import PipelineLinks, StepProgram
from hpml_compiler.options import Options
from hpml_compiler.planner.graph.microbatching import prepare_around_loop
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, schedule_of
from hpml_compiler.planner.pipeline.stage_checkpointing import StagedStep
from hpml_compiler.planner.pipeline.stage_halves import FindsStages, StagedBody, StageSplit, stage_body, structure_of
from hpml_compiler.runtime.consistency.rank_sync import from_rank_0, same_graph, when_all_succeed
from hpml_compiler.runtime.placements.single_rank_placement import no_rows
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from passes.errors import BadInput
from passes.graph.graph_signature import GraphSignature
from passes.op_rules.recomputable import is_recomputable
from passes.pipeline.find_stages import TooFewBlocks
from passes.pipeline.stage_assignment import StageAssignment
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.transforms.microbatch.loop_split import split_at_markers

log = logging.getLogger("hpml")
KeepsInStages = Callable[[StagedStep], Mapping[int, StageSplit]]


def has_effects(gm: GraphModule) -> bool:
    """True if a graph has side effects or draws random numbers."""
    return any(node.op == "call_function" and not is_recomputable(node) for node in gm.graph.nodes)


class StageCutter:
    """Cuts a graph into stages, all ranks together. interface: of the marked graph. starts: first block of each stage but stage
    0; if empty, or if an inference graph does not have these blocks, boundaries balance the predicted times. keep: under a
    memory budget, decides how the stages of this rank are split into forward and backward. repeats: collectives of
    parameters that each microbatch runs. alike: all ranks have equal graphs, as without unequal rows."""

    def __init__(self, options: Options, marked: GraphModule, microbatches: int, forward_outputs: int,
                 interface: GraphSignature, starts: tuple[str, ...] = (), keep: KeepsInStages | None = None,
                 repeats: LoopGathers = ONCE, alike: bool = True):
        self.options, self.marked, self.microbatches, self.forward_outputs = options, marked, microbatches, forward_outputs
        self.interface, self.starts, self.repeats = interface, starts, repeats
        self.loop = split_at_markers(marked, forward_outputs)
        self.place = session.current().device_mesh(options.mesh or {}).get_local_rank(PP_AXIS)
        self.table = schedule_of(options, microbatches)
        self.alike = alike
        if alike or keep is not None:  # which values are saved is told by name
            same_graph(lambda: structure_of(self.loop.body))
        self.staged = self._staged()
        times = self.staged.stages.time_us  # of one microbatch
        step = StagedStep(marked, interface, self.loop, self.staged, self.table, forward_outputs)
        splits, self.counted, self.needs = {} if keep is None else keep(step), keep is not None, step.needs
        self.stages = when_all_succeed("split its stages into forward and backward", lambda: tuple(
            stage_program(graph, options.compiler, self.table.splits_backward, times[graph.index], splits.get(graph.index))
            for graph in self.staged.graphs if self.table.ranks[graph.index] == self.place))
        if dist.get_rank() == 0:
            log.info("%d stages under %s with %d microbatches: %s", self.table.stages, self.table.name, microbatches,
                     "; ".join(", ".join(blocks) for blocks in self.staged.stages.blocks))

    def _staged(self) -> StagedBody:
        device = local_cluster(self.options, dist.get_world_size()).device
        cut = lambda starts: stage_body(  # noqa: E731
            self.marked, self.interface.kinds, self.loop, self.table.stages, device, self._agreed, starts, self.repeats,
            self.options.chunks, tuple(self.table.ranks), self.options.stage_speeds)
        if self.interface.training or not self.starts:
            return cut(self.starts)
        try:
            return cut(self.starts)
        except TooFewBlocks:
            raise
        except BadInput:  # an inference graph without these blocks: balance its own times
            return cut(())

    def _agreed(self, find: FindsStages) -> StageAssignment:
        """Rank 0's stages; where ranks have unequal graphs, by the blocks that these begin with."""
        first = from_rank_0(find)
        return first if self.alike else replace(find(tuple(blocks[0] for blocks in first.blocks[1:])), time_us=first.time_us)

    def given_to(self, owners: Mapping[str, int], written: Container[int], others: bool, outputs: Mapping[int, int],
                 tangents: Mapping[str, int]) -> StepProgram:
        """The program of this rank. owners: placeholder -> rank, for parameters that one rank has alone; tangents: the same for
        gradients of outputs. Those that other ranks' stages need, too, are lent to all ranks for the step. written, others: see
        `step_interface`. outputs: results that stay on one rank, with that rank."""
        needed_alone = self.needs.owners(owners)
        own = {name: rank for name, rank in owners.items() if needed_alone.get(name) == rank}
        values = {node.name: node.meta.get("val") for node in self.marked.graph.nodes}
        lent = {name: (rank, values[name]) for name, rank in owners.items() if name not in own}
        lent |= {name: (rank, values[name]) for name, rank in tangents.items()
                 if self.needs.is_needed_elsewhere(name, rank, own)}
        elsewhere = {name: values[name] for name in self.needs.gradients_elsewhere(self.place, owners)}
        saved = [fake for stage in self.stages for _ in range(self.microbatches) for fake in stage.halves.saved.values()]
        around = self.needs.around(self.place, own)
        prepare_around_loop(around, self.options.compiler, self.options.is_compact or self.repeats != ONCE)
        parts = step_interface(self.marked, around, self.microbatches, self.forward_outputs, written, others, saved)
        parts = replace(parts, inputs={name: self._here(x, tangents.get(name)) for name, x in parts.inputs.items()},
                        results=tuple(self._here(x, outputs.get(k)) for k, x in enumerate(parts.results)))
        stay = {self.loop.results[k] for k in outputs}
        links = PipelineLinks(self.staged.reads, self.staged.outputs, self.staged.gradients, self.needs.gradients_alone(own),
                              elsewhere, lent, frozenset(k for k, each in enumerate(self.loop.forward) if each.name in stay))
        return StepProgram(parts, self.stages, links, self.counted)

    def _here(self, fake: Any, owner: int | None) -> Any:
        """The part that this rank has. owner: the rank that has all of it; None: every one."""
        return fake if owner in (None, self.place) else fake.new_empty(no_rows(fake.shape))
