"""One Dynamo graph on one device: inductor's own compile or, where a budget, microbatches or blocks are asked for, ours."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.code_folder import code_can_be_written
from hpml_compiler.compile.cut import Cut
from hpml_compiler.compile.earlier import Earlier, Entry
from hpml_compiler.compile.graph_compiler import GraphCompiler, Halves
from hpml_compiler.compile.graph_inputs import sizes_are_numbers
from hpml_compiler.compile.launch_key import Given
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Call, boxed
from hpml_compiler.compile.microbatched import Looped, MakesWhole, in_microbatches
from hpml_compiler.compile.phases import phase
from hpml_compiler.compile.refused import refuse
from hpml_compiler.compile.runtime_metadata import RuntimeMetadata
from hpml_compiler.compile.sharing import sharing_of
from hpml_compiler.compile.unplanned import UnplannedInTime, UnplannedKept, unpacked
from hpml_compiler.options import Options
from hpml_compiler.planning.microbatches import fitting_rows, loss_alone, times_of
from hpml_compiler.planning.one_device import keep_on_one_device
from hpml_compiler.planning.plan_graph import solver_options
from hpml_compiler.planning.room import Sharing
from hpml_compiler.plans.kept import KeptPlan
from hpml_compiler.runtime.inputs import copy_for_set_data
from hpml_compiler.runtime.optimizer_offload import offload_state, watch_steps
from passes import compat
from passes.graph.copied import copied
from passes.graph.interface import graph_inputs
from passes.graph.nodes import returned_nodes
from passes.partition.in_time import InTime, on_one_device
from passes.presets import annotate
from passes.presets import one_device as prepare
from passes.tracing.trace import Traced
from passes.transform.collectives import MeshGroups


def one_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if options.offloads("optimizer"):
        offload_state((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), options.offload_folder or "")
        watch_steps()
    ours = options.memory_budget is not None or options.microbatches > 1 or options.compile_blocks == "on"
    if ours and torch.is_grad_enabled():
        return OneDevice(gm, example_inputs, options).compile()
    if options.compiler == "inductor":
        with phase("compile", "compiling with inductor", {}), code_can_be_written():
            return compat.inductor_whole(gm, example_inputs, code_can_be_written)
    copy_for_set_data(gm)
    compiler = lambda graph, _: boxed(graph.forward)  # noqa: E731
    return compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(gm, example_inputs)


class OneDevice(GraphCompiler):
    """One graph under a budget, by which it is decided what is kept for backward; or in microbatches, where its rows allow
    them; or with equal blocks compiled once."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options):
        super().__init__(gm, given, options, "")
        self.lowering.blocks = "on" if options.compile_blocks == "on" else "off"
        self.cluster = local_cluster(options, 1)
        self.sharing: Sharing | None = None
        if options.memory_budget is not None:
            self.sharing = sharing_of(self.session.step, gm, given, options, self.cluster.device.memory_bytes)
            self.options = self.sharing.options
        self.takes = RuntimeMetadata()

    def compile(self) -> Callable[..., Any]:
        refuse(self.gm)
        copy_for_set_data(self.gm)
        sizes_are_numbers(self.gm, self.given)  # what is decided for one size need not fit with another
        self.described = graph_inputs(self.gm, self.given)
        shapes = [x.shape for x, its in zip(self.given, self.described, strict=True) if its.kind == "batch"]
        self.microbatches = fitting_rows(shapes, self.options.microbatches)
        given = Given(self.given, self.given, self.described)
        self.earlier = Earlier(self.gm, given, self.options, self.sharing)
        call = self.trace(self.given)
        if self.program is not None:
            session.save_plan()  # which says now what was compiled in blocks
        self.earlier.keep(self.takes)
        return call

    def split(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Halves | None:
        self.takes = RuntimeMetadata(written=frozenset(compat.inputs_written(joint)))
        if self.sharing is not None:
            return self._within_budget(joint, self.sharing, forward_outputs)
        if self.microbatches > 1 and self._goes_through_microbatches(joint, forward_outputs):
            return None
        with self.doing("rewrite", "rewriting"):
            prepare(self.options.compiler)(joint)
            return self.halves(joint, inputs, forward_outputs, static_inputs)

    def restore(self, restored: Any, found: Entry, forward_outputs: int) -> None:
        if self.sharing is not None:
            self.lowering.count_bytes()
            assert found.running.budgeted is not None, "under a budget, what is kept is decided"
            self.session.step.graphs[self.sharing.frame] = found.running.budgeted
        if isinstance(restored, Cut):
            packed = found.unplanned
            assert packed is not None, "of what goes through microbatches, a plan can be asked for"
            self.program = Looped(self.options, restored,
                                  lambda: self._whole_step(unpacked(packed).traced, forward_outputs), shares=False)
        if found.unplanned is not None:
            self.plan_later(found.unplanned, self.cluster)

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Under a budget, those by which `hpml plan` traces for one device."""
        return None if self.sharing is not None and not self.lowering.inductor else super().decompositions()

    def backward_of(self, call: Call, gm: GraphModule) -> Call:
        return call

    def _within_budget(self, joint: GraphModule, sharing: Sharing, forward_outputs: int) -> Halves:
        traced = Traced(copied(joint), self.described, forward_outputs, 0.0)
        with self.doing("solve", "deciding what is kept for backward"):
            kept = keep_on_one_device(joint, forward_outputs, sharing, self.cluster, self._pinned(traced))
        self.takes = replace(self.takes, budgeted=self.session.step.enter(sharing, sharing.whole, kept))
        unplanned = UnplannedKept(traced, self.options, kept)
        self.plan_later(unplanned, self.cluster)
        halves = self.lowering.cut(joint, kept, forward_outputs, self.options.offload_folder or "")
        self.note_halves(halves, unplanned)
        return halves

    def _goes_through_microbatches(self, joint: GraphModule, forward_outputs: int) -> bool:
        traced = Traced(copied(joint), self.described, forward_outputs, 0.0)
        found = self._in_microbatches(loss_alone(joint), forward_outputs, lambda: self._whole_step(traced, forward_outputs))
        if found is None:
            return False
        self.program, times = found
        unplanned = UnplannedInTime(traced, self.options, times)
        self.plan_later(unplanned, self.cluster)
        self.earlier.note(found[0].cut, found[0].parts.saved, unplanned)
        return True

    def _whole_step(self, traced: Traced, forward_outputs: int) -> Looped | None:
        """The same for gradients at all outputs."""
        found = self._in_microbatches(copied(traced.gm), forward_outputs, None)
        return found and found[0]

    def _in_microbatches(self, gm: GraphModule, forward_outputs: int, whole: MakesWhole | None,
                         ) -> tuple[Looped, InTime] | None:
        with self.doing("annotate", "annotating"):
            annotated = annotate(gm, self.described, forward_outputs, self.microbatches)
        with self.doing("solve", "deciding what goes through microbatches"):
            times = times_of(annotated.graph, self.microbatches, solver_options(self.options))
        if times is None:
            return None
        gradients = range(forward_outputs, len(returned_nodes(gm)))
        with self.doing("rewrite", "rewriting"):
            return in_microbatches(gm, annotated, on_one_device(annotated.graph), times, MeshGroups((), (), ()), self.options,
                                   forward_outputs, gradients, whole), times

    def _pinned(self, traced: Traced) -> KeptPlan | None:
        """What a plan for one device keeps, where there is one."""
        given = self.options.load_plan()
        if given is None or given.world_size != 1 or not any(graph.kept for graph in given.graphs):
            return None
        graph_hash = annotate(copied(traced.gm), traced.inputs, traced.forward_outputs).hash()
        return given.check(graph_hash, torch.__version__, 1).kept
