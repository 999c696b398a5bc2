"""One Dynamo graph on one device whose step goes through its batch in microbatches, or whose equal blocks are compiled once."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.cut import Cut
from hpml_compiler.compile.earlier import Earlier, Entry
from hpml_compiler.compile.graph_inputs import sizes_are_numbers
from hpml_compiler.compile.launch_key import Given
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.compile.microbatched import Looped, MakesWhole, in_microbatches
from hpml_compiler.compile.phases import phase
from hpml_compiler.compile.refused import refuse
from hpml_compiler.compile.unplanned import Later, Unplanned, UnplannedInTime, unpacked
from hpml_compiler.options import Options
from hpml_compiler.planning.microbatches import fitting_rows, loss_alone, times_of
from hpml_compiler.planning.plan_graph import solver_options
from hpml_compiler.runtime.inputs import copy_for_set_data
from passes import compat
from passes.graph.copied import copied
from passes.graph.interface import graph_inputs
from passes.graph.nodes import returned_nodes
from passes.partition.in_time import InTime, on_one_device
from passes.presets import annotate
from passes.presets import one_device as prepare
from passes.tracing.trace import Traced, decompositions
from passes.transform.collectives import MeshGroups
from passes.transform.microbatches import Loop


class InParts:
    """Microbatches where the rows allow them, blocks where they are asked for; the whole graph if neither is possible."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options):
        self.gm, self.inputs, self.options = gm, inputs, options
        self.lowering = Lowering(options.compiler, blocks="on" if options.compile_blocks == "on" else "off")
        self.runs: Looped | None = None
        self.written: frozenset[int] = frozenset()
        self.seconds: dict[str, float] = {}

    def compile(self) -> Callable[..., Any]:
        refuse(self.gm)
        copy_for_set_data(self.gm)
        sizes_are_numbers(self.gm, self.inputs)
        self.described = graph_inputs(self.gm, self.inputs)
        shapes = [x.shape for x, its in zip(self.inputs, self.described, strict=True) if its.kind == "batch"]
        self.microbatches = fitting_rows(shapes, self.options.microbatches)
        self.earlier = Earlier(self.gm, Given(self.inputs, self.inputs, self.described), self.options, kinds=(Cut, Loop))
        backend = compat.aot_autograd(
            fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=self._inference,
            partition_fn=self._partition, decompositions=decompositions(self.options.compiler))
        with phase("trace", "tracing", self.seconds):
            call = backend(self.earlier.graph, self.inputs)
        if self.runs is not None:
            session.save_plan()  # which says now what was compiled in blocks
        self.earlier.keep(None, self.written, ())
        return call

    def _partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        if self.earlier.found is not None:
            return self._restored(self.earlier.found, num_fwd_outputs)
        self.earlier.note_results(joint, num_fwd_outputs)
        self.written = frozenset(compat.inputs_written(joint))
        if self.microbatches > 1:
            traced = Traced(copied(joint), self.described, num_fwd_outputs, 0.0)
            whole = lambda: self._whole_step(traced, num_fwd_outputs)  # noqa: E731
            runs = self._in_microbatches(loss_alone(joint), num_fwd_outputs, whole)
            if runs is not None:
                self.runs, times = runs
                self._note_plan(unplanned := UnplannedInTime(traced, self.options, times))
                self.earlier.note(self.runs.cut, self.runs.parts.saved, unplanned)
                return self.runs.partition()
        with phase("rewrite", "rewriting", self.seconds):
            prepare(self.options.compiler)(joint)
            halves = self.lowering.partition(joint, inputs, num_fwd_outputs, kwargs.get("static_lifetime_input_indices"))
        self.earlier.note_halves(halves)
        return halves

    def _restored(self, found: Entry, forward_outputs: int) -> Any:
        """What an earlier launch left in the place of the traced graph."""
        with phase("restore", "reading what it was rewritten to", self.seconds):
            restored = self.earlier.restored()
        if not isinstance(restored, Cut):
            self.lowering.forward_outputs, self.lowering.shares = forward_outputs, False
            return restored
        packed = found.unplanned
        assert packed is not None, "of what goes through microbatches, a plan can be asked for"
        self.runs = Looped(self.options, restored, lambda: self._whole_step(unpacked(packed).traced, forward_outputs),
                           shares=False)
        self._note_plan(packed)
        return self.runs.partition()

    def _whole_step(self, traced: Traced, forward_outputs: int) -> Looped | None:
        """The same for gradients at all outputs."""
        found = self._in_microbatches(copied(traced.gm), forward_outputs, None)
        return found and found[0]

    def _in_microbatches(self, gm: GraphModule, forward_outputs: int, whole: MakesWhole | None,
                         ) -> tuple[Looped, InTime] | None:
        with phase("annotate", "annotating", self.seconds):
            annotated = annotate(gm, self.described, forward_outputs, self.microbatches)
        with phase("solve", "deciding what goes through microbatches", self.seconds):
            times = times_of(annotated.graph, self.microbatches, solver_options(self.options))
        if times is None:
            return None
        gradients = range(forward_outputs, len(returned_nodes(gm)))
        with phase("rewrite", "rewriting", self.seconds):
            return in_microbatches(gm, annotated, on_one_device(annotated.graph), times, MeshGroups((), (), ()), self.options,
                                   forward_outputs, gradients, whole), times

    def _note_plan(self, unplanned: Unplanned | bytes) -> None:
        assert self.runs is not None, "only what goes through microbatches has a plan"
        current = session.current()
        current.options, current.cluster = self.options, str(local_cluster(self.options, 1))
        current.unplanned.append(Later(unplanned, self.seconds, self.runs.reports))
        session.save_plan()

    def _forward(self, graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.earlier.note_forward()
        with phase("compile forward", "compiling forward", self.seconds):
            return self.lowering.forward(graph, inputs) if self.runs is None else self.runs.forward()

    def _backward(self, graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        if self.runs is not None:
            return self.runs.backward()  # compiled with forward
        self.earlier.note_backward()
        with phase("compile backward", "compiling backward", self.seconds), compat.writing_only_over(self.earlier.writes_over):
            return self.lowering.backward(graph, inputs)

    def _inference(self, graph: GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        with phase("compile forward", "compiling forward", self.seconds):
            return self.lowering.inference(graph)
