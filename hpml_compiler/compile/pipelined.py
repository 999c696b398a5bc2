"""A graph whose step goes through the stages of a pipeline, each on a rank of its own, microbatch by microbatch.

Every rank traces and cuts the whole graph, and compiles what is around its loop and the stages that it runs. Parameters are
whole on every rank, and so are gradients: each is made where its stage is, and given to the others.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.agreement import from_rank_0, same_graph, when_all_can
from hpml_compiler.compile.graph_inputs import GraphInputs, guard_on_sizes, sizes_are_numbers
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.compile.microbatched import MakesWhole, Microbatched, fitting_rows, loss_alone, times_of
from hpml_compiler.compile.recompiles import note_function
from hpml_compiler.compile.stages import LoweredStage, stage_body
from hpml_compiler.options import Options
from hpml_compiler.planning.plan_graph import solver_options
from hpml_compiler.runtime.alike import own_values, same_values
from hpml_compiler.runtime.calls import backward_call, forward_call
from hpml_compiler.runtime.compared import draws_random_numbers, of_backward, of_forward
from hpml_compiler.runtime.devices import device_type
from hpml_compiler.runtime.doing import Spot
from hpml_compiler.runtime.microbatches import Call
from hpml_compiler.runtime.parameters import install
from hpml_compiler.runtime.pipelined import Pipelined, of_loop
from hpml_compiler.runtime.stages import Messages
from hpml_compiler.runtime.together import CALLING, together
from hpml_compiler.runtime.world import world_mesh
from passes import compat
from passes.errors import BadInput
from passes.graph.annotated import Annotated
from passes.graph.copied import copied
from passes.graph.placement_graph import InputKind
from passes.partition.in_time import on_one_device, on_time_axis
from passes.presets import annotate, to_microbatches, whole_batch
from passes.schedule.actions import schedule
from passes.tracing.trace import decompositions
from passes.transform.collectives import MeshGroups

log = logging.getLogger("hpml")


class Pipeline(Microbatched):
    """Microbatches of which this rank runs some stages. kinds: of the inputs of the marked graph, by name."""

    def __init__(self, options: Options, marked: GraphModule, microbatches: int, forward_outputs: int,
                 kinds: Mapping[str, InputKind], written: Container[int], whole: MakesWhole | None):
        self.kinds = kinds
        super().__init__(options, marked, microbatches, forward_outputs, written, whole)

    def cut_body(self) -> None:
        options = self.options
        self.mesh = session.current().device_mesh(options.mesh or {})
        self.place = self.mesh.get_local_rank("pp")
        self.table = schedule(options.schedule_name, options.stage_ranks, self.microbatches, options.virtual_stages)
        device = local_cluster(options, dist.get_world_size()).device
        self.staged = stage_body(self.marked, self.kinds, self.loop, self.table.stages, device, from_rank_0)
        self.stages = when_all_can("cut its stages in two", lambda: [
            LoweredStage(graph, options.compiler) for graph in self.staged.graphs
            if self.table.ranks[graph.index] == self.place])
        if dist.get_rank() == 0:
            log.info("%d stages under %s with %d microbatches: %s", self.table.stages, self.table.name, self.microbatches,
                     "; ".join(", ".join(blocks) for blocks in self.staged.stages.blocks))

    def saved_in_loop(self) -> list[Any]:
        return [fake for stage in self.stages for _ in range(self.microbatches) for fake in stage.saved.values()]

    def schedule(self) -> Pipelined:
        stages = when_all_can("compile its stages", lambda: {stage.graph.index: stage.calls() for stage in self.stages})
        group = self.mesh.get_group("pp")
        messages = Messages(dist.get_process_group_ranks(group), torch.device(device_type()), group)
        return Pipelined(self.loop, self.calls(of_loop, None, ()), self.table, self.place, stages, messages,
                         self.staged.reads, self.staged.outputs, self.staged.gradients)


class PipelinedGraph:
    """One Dynamo graph on its way through the compiler."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options):
        self.gm, self.given, self.options = gm, inputs, options
        self.name = f"graph of a pipeline, {len(session.current().graphs)}"
        self.lowering = Lowering(options.compiler)
        self.runs: Pipeline | None = None
        self.draws = False
        others = [axis for axis, size in (options.mesh or {}).items() if axis != "pp" and size > 1]
        if others:
            raise BadInput(f"stages of a pipeline go with no other axis yet, and the mesh has {', '.join(others)}",
                           "options['mesh']", f'give {{"pp": {dist.get_world_size()}}}, or leave pp out')

    def compile(self) -> Callable[..., Any]:
        note_function()
        for node in self.gm.graph.find_nodes(op="placeholder"):
            guard_on_sizes(getattr(node.meta["example_value"], "_local_tensor", None))
        self.inputs = GraphInputs(self.gm, self.given, self.options)
        self.inputs.gathered |= self.inputs.rows
        sizes_are_numbers(self.gm, examples := self.inputs.examples)
        shapes = [x.shape for x, its in zip(examples, self.inputs.described, strict=True) if its.kind == "batch"]
        self.microbatches = fitting_rows(shapes, self.options.microbatches, speaks=dist.get_rank() == 0)
        function = compat.aot_autograd(
            fw_compiler=lambda graph, _: self._runs().forward(), bw_compiler=self._backward,
            inference_compiler=lambda graph, _: self.lowering.inference(graph), partition_fn=self._partition,
            decompositions=decompositions(self.options.compiler))(self.gm, examples)
        same_values(own_values(self.inputs.described, self.given))
        written = self.inputs.written if self.runs is not None else ()
        installed = install({}, self.gm, self.given, world_mesh(), self.inputs.gathered, written)
        half = of_forward(self.name, self.inputs.described, self.given, self.draws)
        return forward_call(lambda *args: function(*installed.locals(args)), Spot(f"forward of {self.name}"), half,
                            self.runs is not None)

    def _runs(self) -> Pipeline:
        assert self.runs is not None, "AOTAutograd partitions every graph that it compiles forward and backward of"
        return self.runs

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        original = copied(joint)
        self.inputs.written = compat.inputs_written(joint)
        self.draws = draws_random_numbers(joint)
        with compat.outside_tracing():
            together("compiling a graph", CALLING, every=0)
        self.runs = self._pipeline(loss_alone(joint), num_fwd_outputs,
                                   lambda: self._pipeline(copied(original), num_fwd_outputs, None))
        return self.runs.partition()

    def _pipeline(self, joint: GraphModule, forward_outputs: int, whole: MakesWhole | None) -> Pipeline:
        annotated = annotate(joint, self.inputs.described, forward_outputs, self.microbatches)
        same_graph(annotated.hash(), annotated.text)
        kinds = dict(annotated.interface.kinds)
        microbatches = self._mark(annotated, forward_outputs)
        return Pipeline(self.options, joint, microbatches, forward_outputs, kinds, self.inputs.written, whole)

    def _mark(self, annotated: Annotated, forward_outputs: int) -> int:
        """Put the markers of the loop in; returns how many microbatches go through it."""
        joint, graph, count = annotated.gm, annotated.graph, self.microbatches
        gradients = self.inputs.kept_gradients(annotated, forward_outputs)
        times = None if count == 1 else from_rank_0(lambda: times_of(graph, count, solver_options(self.options)))
        if times is None:
            whole_batch(forward_outputs, gradients)(joint)
            return 1
        decision = on_time_axis(on_one_device(graph), graph, times)
        to_microbatches(decision, MeshGroups((), (), ()).with_time(count), forward_outputs, gradients)(joint)
        return count

    def _backward(self, graph: GraphModule, _: Any) -> Call:
        return backward_call(self._runs().backward(), Spot(f"backward of {self.name}"), of_backward(self.name, graph))
