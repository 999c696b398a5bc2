"""One Dynamo graph on one device: inductor's own compile or, under a byte budget, with what is kept for backward decided."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.code_folder import code_can_be_written
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering, boxed
from hpml_compiler.compile.microbatched import OneDevice
from hpml_compiler.compile.phases import phase
from hpml_compiler.compile.refused import refuse
from hpml_compiler.compile.sharing import sharing_of
from hpml_compiler.compile.unplanned import Unplanned
from hpml_compiler.options import Options
from hpml_compiler.planning.one_device import keep_on_one_device
from hpml_compiler.plans.kept import KeptPlan
from hpml_compiler.runtime.inputs import copy_for_set_data
from hpml_compiler.runtime.optimizer_offload import offload_state, watch_steps
from passes import compat
from passes.graph.interface import graph_inputs
from passes.keeping.keys import KeptNodes


def one_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if options.offloads("optimizer"):
        offload_state((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), options.offload_folder or "")
        watch_steps()
    if options.memory_budget is not None and torch.is_grad_enabled():
        return _Budgeted(gm, example_inputs, options).compile()
    if (options.microbatches > 1 or options.compile_blocks == "on") and torch.is_grad_enabled():
        return OneDevice(gm, example_inputs, options).compile()
    if options.compiler == "inductor":
        with phase("compile", "compiling with inductor", {}), code_can_be_written():
            return compat.inductor_whole(gm, example_inputs, code_can_be_written)
    copy_for_set_data(gm)
    compiler = lambda graph, _: boxed(graph.forward)  # noqa: E731
    return compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(gm, example_inputs)


class _Budgeted:
    """One graph, of which it is decided what is kept for backward."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options):
        self.gm, self.inputs = gm, inputs
        memory_bytes = local_cluster(options, 1).device.memory_bytes
        self.sharing = sharing_of(session.current().step, gm, inputs, options, memory_bytes)
        self.options = self.sharing.options
        self.lowering = Lowering(options.compiler)
        self.seconds: dict[str, float] = {}

    def compile(self) -> Callable[..., Any]:
        refuse(self.gm)
        copy_for_set_data(self.gm)
        self.described = graph_inputs(self.gm, self.inputs)
        backend = compat.aot_autograd(
            fw_compiler=self._compiling("forward", self.lowering.forward),
            bw_compiler=self._compiling("backward", self.lowering.backward),
            inference_compiler=self._compiling("forward", lambda graph, _: self.lowering.inference(graph)),
            partition_fn=self._partition,
            decompositions=compat.inductor_decompositions() if self.options.compiler == "inductor" else None)
        with phase("trace", "tracing", self.seconds):
            return backend(self.gm, self.inputs)

    def _compiling(self, half: str, compile_half: Callable[[GraphModule, Any], Any]) -> Callable[[GraphModule, Any], Any]:
        def timed(gm: GraphModule, inputs: Any) -> Any:
            with phase(f"compile {half}", f"compiling {half}", self.seconds):
                return compile_half(gm, inputs)
        return timed

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        unplanned = Unplanned(joint, self.described, num_fwd_outputs, self.options)
        with phase("solve", "deciding what is kept for backward", self.seconds):
            pinned, cluster = self._pinned(unplanned), local_cluster(self.options, 1)
            kept = keep_on_one_device(joint, num_fwd_outputs, self.sharing, cluster, pinned)
        session.current().step.enter(self.sharing, self.sharing.whole, kept)
        self._note_plan(unplanned, kept)
        return self.lowering.cut(joint, kept, num_fwd_outputs, self.options.offload_folder or "")

    def _pinned(self, unplanned: Unplanned) -> KeptPlan | None:
        """What a plan for one device keeps, where there is one."""
        given = self.options.load_plan()
        if given is None or given.world_size != 1 or not any(graph.kept for graph in given.graphs):
            return None
        return given.check(unplanned.hash(), torch.__version__, 1).kept

    def _note_plan(self, unplanned: Unplanned, kept: KeptNodes) -> None:
        current, unplanned.kept, unplanned.seconds = session.current(), kept, self.seconds
        current.options, current.cluster = self.options, str(local_cluster(self.options, 1))
        current.unplanned.append(unplanned.plan)
        session.save_plan()
