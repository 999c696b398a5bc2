"""One Dynamo graph on one device: inductor's own compile or, under a byte budget, with what is kept for backward decided."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.code_folder import code_can_be_written
from hpml_compiler.compile.earlier import Earlier, Entry
from hpml_compiler.compile.graph_inputs import sizes_are_numbers
from hpml_compiler.compile.in_parts import InParts
from hpml_compiler.compile.launch_key import Given
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering, boxed
from hpml_compiler.compile.phases import phase
from hpml_compiler.compile.refused import refuse
from hpml_compiler.compile.sharing import sharing_of
from hpml_compiler.compile.unplanned import Later, Unplanned, UnplannedKept
from hpml_compiler.options import Options
from hpml_compiler.planning.one_device import keep_on_one_device
from hpml_compiler.planning.room import Held
from hpml_compiler.plans.kept import KeptPlan
from hpml_compiler.runtime.inputs import copy_for_set_data
from hpml_compiler.runtime.optimizer_offload import offload_state, watch_steps
from passes import compat
from passes.graph.copied import copied
from passes.graph.interface import graph_inputs
from passes.presets import annotate
from passes.tracing.trace import Traced


def one_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if options.offloads("optimizer"):
        offload_state((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), options.offload_folder or "")
        watch_steps()
    if options.memory_budget is not None and torch.is_grad_enabled():
        return _Budgeted(gm, example_inputs, options).compile()
    if (options.microbatches > 1 or options.compile_blocks == "on") and torch.is_grad_enabled():
        return InParts(gm, example_inputs, options).compile()
    if options.compiler == "inductor":
        with phase("compile", "compiling with inductor", {}), code_can_be_written():
            return compat.inductor_whole(gm, example_inputs, code_can_be_written)
    copy_for_set_data(gm)
    compiler = lambda graph, _: boxed(graph.forward)  # noqa: E731
    return compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(gm, example_inputs)


@dataclass(frozen=True)
class _Kept:
    """What running a graph takes of which that was decided. held: what it counts for in its step."""

    written: frozenset[int]
    held: Held


class _Budgeted:
    """One graph, of which it is decided what is kept for backward."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options):
        self.gm, self.inputs = gm, inputs
        memory_bytes = local_cluster(options, 1).device.memory_bytes
        self.sharing = sharing_of(session.current().step, gm, inputs, options, memory_bytes)
        self.options = self.sharing.options
        self.lowering = Lowering(options.compiler)
        self.seconds: dict[str, float] = {}
        self.kept: _Kept | None = None

    def compile(self) -> Callable[..., Any]:
        refuse(self.gm)
        copy_for_set_data(self.gm)
        sizes_are_numbers(self.gm, self.inputs)  # what is kept of one size need not fit with another
        self.described = graph_inputs(self.gm, self.inputs)
        given = Given(self.inputs, self.inputs, self.described)
        self.earlier = Earlier(self.gm, given, self.options, self.sharing, kinds=(_Kept,))
        backend = compat.aot_autograd(
            fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=compat.inductor_decompositions() if self.options.compiler == "inductor" else None)
        with phase("trace", "tracing", self.seconds):
            call = backend(self.earlier.graph, self.inputs)
        if self.kept is not None:
            self.earlier.keep(self.kept, self.kept.written, ())
        return call

    def _forward(self, gm: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.earlier.note_forward()
        with self._doing("compile forward", "compiling forward"):
            return self.lowering.forward(gm, inputs)

    def _backward(self, gm: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.earlier.note_backward()
        with self._doing("compile backward", "compiling backward"), compat.writing_only_over(self.earlier.writes_over):
            return self.lowering.backward(gm, inputs)

    def _inference(self, gm: GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        with self._doing("compile forward", "compiling forward"):
            return self.lowering.inference(gm)

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        if self.earlier.found is not None:
            return self._restored(self.earlier.found, num_fwd_outputs)
        self.earlier.note_results(joint, num_fwd_outputs)
        traced = Traced(copied(joint), self.described, num_fwd_outputs, 0.0)
        written = frozenset(compat.inputs_written(joint))
        with self._doing("solve", "deciding what is kept for backward"):
            pinned, cluster = self._pinned(traced), local_cluster(self.options, 1)
            kept = keep_on_one_device(joint, num_fwd_outputs, self.sharing, cluster, pinned)
        self.kept = _Kept(written, session.current().step.enter(self.sharing, self.sharing.whole, kept))
        unplanned = UnplannedKept(traced, self.options, kept)
        self._note_plan(unplanned)
        halves = self.lowering.cut(joint, kept, num_fwd_outputs, self.options.offload_folder or "")
        self.earlier.note_halves(halves, unplanned)
        return halves

    def _restored(self, found: Entry, forward_outputs: int) -> Any:
        """Forward and backward as an earlier launch left them."""
        assert found.unplanned is not None, "where something was decided, a plan can be asked for"
        self.lowering.forward_outputs, self.lowering.shares = forward_outputs, False
        self.lowering.count_bytes()
        session.current().step.graphs[self.sharing.frame] = found.running.held
        self._note_plan(found.unplanned)
        with self._doing("restore", "reading what it was rewritten to"):
            return self.earlier.restored()

    def _pinned(self, traced: Traced) -> KeptPlan | None:
        """What a plan for one device keeps, where there is one."""
        given = self.options.load_plan()
        if given is None or given.world_size != 1 or not any(graph.kept for graph in given.graphs):
            return None
        graph_hash = annotate(copied(traced.gm), traced.inputs, traced.forward_outputs).hash()
        return given.check(graph_hash, torch.__version__, 1).kept

    def _note_plan(self, unplanned: Unplanned | bytes) -> None:
        current = session.current()
        current.options, current.cluster = self.options, str(local_cluster(self.options, 1))
        current.unplanned.append(Later(unplanned, self.seconds))
        session.save_plan()

    def _doing(self, what: str, text: str) -> phase:
        return phase(what, text, self.seconds)
