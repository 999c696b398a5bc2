"""One Dynamo graph on one device: inductor's own compile or, under a byte budget, with what is kept for backward decided."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.kept import decide_kept, note_kept
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering, boxed
from hpml_compiler.compile.offload import offload_price
from hpml_compiler.compile.unplanned import Unplanned
from hpml_compiler.options import Options
from hpml_compiler.runtime.optimizer_offload import offload_state, watch_steps
from passes import compat
from passes.analysis.tape import MakeTape
from passes.costs.prices import MeshPrices
from passes.graph.interface import graph_inputs
from passes.keeping.keys import KeptNodes
from passes.machine.mesh import enumerate_meshes
from passes.presets import one_device as prepare
from passes.presets import taping


def one_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if options.offloads("optimizer"):
        offload_state((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), options.offload_folder or "")
        watch_steps()
    if options.memory_budget is not None and torch.is_grad_enabled():
        return _Budgeted(example_inputs, options).compile(gm)
    if options.compiler == "inductor":
        return compat.inductor_whole(gm, example_inputs)
    compiler = lambda graph, _: boxed(graph.forward)  # noqa: E731
    return compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(gm, example_inputs)


class _Budgeted:
    """One graph, of which it is decided what is kept for backward."""

    def __init__(self, inputs: Sequence[Any], options: Options):
        self.inputs, self.options = inputs, options
        self.lowering = Lowering(options.compiler)

    def compile(self, gm: GraphModule) -> Callable[..., Any]:
        self.described = graph_inputs(gm, self.inputs)
        return compat.aot_autograd(
            fw_compiler=self.lowering.forward, bw_compiler=self.lowering.backward,
            inference_compiler=lambda graph, _: self.lowering.inference(graph), partition_fn=self._partition,
            decompositions=compat.inductor_decompositions() if self.options.compiler == "inductor" else None)(gm, self.inputs)

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        unplanned = Unplanned(joint, self.described, num_fwd_outputs, self.options)
        written = frozenset(compat.inputs_written(joint))
        prepare(self.options.compiler)(joint)
        cluster = local_cluster(self.options, 1)
        (mesh,) = enumerate_meshes(cluster)
        prices = MeshPrices(mesh, self.options.optimizer_states)
        tape = MakeTape(num_fwd_outputs, prices, self.options.compiler == "inductor", written,
                        offload_us=offload_price(self.options, cluster))
        taping(tape)(joint)
        kept = decide_kept(joint, num_fwd_outputs, self._state_bytes(), self.options, "the graph", strict=True)
        note_kept(kept)
        self._note_plan(unplanned, kept)
        return self.lowering.cut(joint, kept, num_fwd_outputs, self.options.offload_folder or "")

    def _note_plan(self, unplanned: Unplanned, kept: KeptNodes) -> None:
        current, unplanned.kept = session.current(), kept
        current.options, current.cluster = self.options, str(local_cluster(self.options, 1))
        current.unplanned.append(unplanned.plan)
        session.save_plan()

    def _state_bytes(self) -> int:
        """Parameters, and what the optimizer keeps for those that are trained, of all graphs so far."""
        held = session.current().state_bytes
        for value in self.inputs:
            if isinstance(value, torch.nn.Parameter):
                states = self.options.resident_states if value.requires_grad else 0
                storage = value.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes() * (1 + states)
        return sum(held.values())
