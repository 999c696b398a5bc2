"""Lower a rewritten joint graph to two callables: partition it, then compile each half."""
from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from hpml_compiler.compile.lower.compile_lock import CompileJob, Prefetch, compile_in_order, job_key
from hpml_compiler.compile.lower.compile_timer import part, tell
from hpml_compiler.compile.lower.inductor_cache_dir import check_cache_dir
from hpml_compiler.compile.lower.regional_compile import RegionalCall
from hpml_compiler.planner.checkpointing.checkpointed_halves import cut_as_kept, drop_unused
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.consistency.memory_agreement import agreeing_on_memory
from passes import compat
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.graph.fx_nodes import inputs_alone_in_memory, on_cpus, returned_nodes
from passes.serialization.serialized_graph import bare
from passes.transforms.comm.prefetch_all_gather import starts_ahead
from passes.transforms.outputs.outputs_beside_loss import keep_results_as_saved

log = logging.getLogger("hpml")

Wanted = Literal["auto", "on", "off"]


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Box a function: the callable takes its arguments as one list and empties it."""

    def call(arguments: list[Any]) -> Any:
        taken = list(arguments)
        arguments.clear()
        return function(*taken)

    return compat.mark_boxed(call)


class _FreeingInterpreter(torch.fx.Interpreter):
    """Interpreter that frees unread results, too, such as those of random numbers that another rank needs."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return result if n.users or n.op == "output" else None


def interpreted(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Boxed callable that interprets a graph and frees each value, also an argument, after its last use."""
    return compat.mark_boxed(lambda arguments: _FreeingInterpreter(gm).boxed_run(arguments))


def values_of(gm: GraphModule) -> list[Any]:
    """Fake values of a graph's inputs; after the rewrite, they have local shapes."""
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


Call = Callable[[list[Any]], Any]


class Lowering:
    """Partitions and compiles one graph, with inductor or without ("eager")."""

    def __init__(self, compiler: str, forward_outputs: int | None = None, blocks: Wanted = "off", agrees: bool = False):
        self.inductor, self.agrees = compiler == "inductor", agrees
        """agrees: whether a half that runs out of memory on one rank fails on all (`memory_agreement`)."""
        self.blocks = blocks
        """Regional compilation: whether equal blocks are compiled once; "auto": where that costs little of `step_us`."""
        self.step_us = 0.0
        """Predicted time of one run of both halves, in µs: a share of the step's if the step calls them several times; 0 if
        unknown."""
        self.reports: dict[str, BlocksReport] = {}
        """Reports of regional compilation, by half: "forward", "backward", or the names that `part` has."""
        self.forward_outputs = forward_outputs
        self.of = ""
        """Name of the part that `part` compiles, such as "stage 1 ", for the progress line."""
        self.reuse = True
        """Allow memory that is no longer read to stay allocated; False under a memory budget."""
        self.shares = True
        """Compile in turn with other processes (`compile_lock`); False where inductor's cache has the code."""
        self.next: GraphModule | None = None
        """Backward, from the partition until forward is compiled."""

    def cut(self, joint: GraphModule, kept: CheckpointDecision, forward_outputs: int, folder: str = "") -> Any:
        """Partition as `cut_as_kept`, for this lowering."""
        self.forward_outputs = forward_outputs
        self.count_bytes()
        return cut_as_kept(joint, kept, forward_outputs, folder)

    def count_bytes(self) -> None:
        """Make compiled code use no more memory than was counted: without memory reuse."""
        self.reuse = False

    def partition(self, joint: GraphModule, inputs: Any, forward_outputs: int, static_inputs: Any) -> Any:
        self.forward_outputs = forward_outputs
        if not self.inductor:
            forward, backward = compat.default_partition(joint, inputs, forward_outputs, static_inputs)
            drop_unused(forward, "is_backward")
            drop_unused(backward, "is_forward")
            return forward, backward
        forward, self.next = compat.min_cut_partition(joint, inputs, forward_outputs, static_inputs)
        return forward, self.next

    def forward(self, gm: GraphModule, _whole: Any) -> Callable[[list[Any]], Any]:
        following, self.next = self.next, None
        if not self.inductor:
            keep_results_as_saved(gm)
        ahead, saved, agreed = Prefetch(), _names_returned(gm), self._agreed(gm)
        if following is not None:
            ahead = Prefetch(lambda: self._ahead(following, saved))
        with self.waiting_once(gm):
            call = self._lower("forward", gm, values_of(gm), is_backward=False, is_inference=False, ahead=ahead)
            ahead.all()  # while the C++ compiler works on forward
        return agreed(call)

    def backward(self, gm: GraphModule, inputs: Any, half: str = "backward") -> Callable[[list[Any]], Any]:
        # AOTAutograd takes `inputs` from the rewritten graph; saved values have the strides that lowering forward gave them.
        agreed = self._agreed(gm)
        with self.waiting_once(gm):
            return agreed(self._lower(half, gm, inputs, is_backward=True, is_inference=False))

    def _agreed(self, gm: GraphModule) -> Callable[[Call], Call]:
        return agreeing_on_memory(gm) if self.agrees else lambda call: call

    def part(self, forward: GraphModule, backwards: Mapping[str, GraphModule], outputs: int) -> tuple[Call, dict[str, Call]]:
        """Compile both halves of a part of the graph that AOTAutograd sees; backward is one graph, or several that run one
        after another, by name. outputs: number of forward's results before the values it saves. Backward takes these by name,
        with the strides that lowering forward gave them; a second graph of backward takes results of the first one in the same
        way.

        AOTAutograd's information about strides and overwritable inputs is about the full graph. No input of a part may be
        overwritten: other parts or microbatches read parameters and rows of the batch, too. Values that its blocks pass to
        each other may.
        """
        with self.waiting_once(forward):
            return self._part(forward, backwards, outputs)

    def _part(self, forward: GraphModule, backwards: Mapping[str, GraphModule], outputs: int) -> tuple[Call, dict[str, Call]]:
        names = _names_returned(forward)
        with part("compile forward", f"compiling {self.of}forward"), compat.strides_of_results() as strides:
            run = self.forward(forward, None)
        given = dict(zip(names[outputs:], (strides or [])[outputs:]))
        calls: dict[str, Call] = {}
        for half, backward in backwards.items():
            if all(node.op != "call_function" for node in backward.graph.nodes):
                calls[half] = interpreted(backward)
                continue
            names = _names_returned(backward)
            inputs = [_with_strides(node.meta["val"], given.get(node.name))
                      for node in backward.graph.find_nodes(op="placeholder")]
            with (part("compile backward", f"compiling {self.of}{half}"), compat.strides_of_results() as strides,
                  compat.restrict_overwriting(frozenset())):
                calls[half] = self.backward(backward, inputs, half)
            given.update(zip(names, strides or []))
        return run, calls

    def inference(self, gm: GraphModule) -> Callable[[list[Any]], Any]:
        with self.waiting_once(gm):
            return self._lower("forward", gm, values_of(gm), is_backward=False, is_inference=True)

    @contextlib.contextmanager
    def waiting_once(self, gm: GraphModule) -> Any:
        """Context that, at its end, waits once for all C++ kernels of the graphs that were lowered inside."""
        with (check_cache_dir() if self.inductor else contextlib.nullcontext(),
              compat.deferred_cpp_kernels() if self.inductor and on_cpus(gm) else contextlib.nullcontext()):
            yield

    def _lower(self, half: str, gm: GraphModule, inputs: Any, *, is_backward: bool, is_inference: bool,
               ahead: Prefetch | None = None) -> Call:
        """ahead: graphs to compile while other processes compile this one."""
        blocks = self._blocks(gm, inputs, is_backward)
        if blocks is not None:
            made, jobs = {}, self._segments(blocks, is_inference)
            tell(f"block 1 of {len(jobs)}")
            for number, call in compile_in_order([*jobs.values()], ahead):
                if call is None:
                    log.info("The graph is compiled without regional compilation: inductor chose other strides for a block "
                             "than traced")
                    break
                made[[*jobs][number]] = call
                tell(f"block {min(len(made) + 1, len(jobs))} of {len(jobs)}")
            else:
                self.reports[half] = report = blocks.report
                log.info("regional compilation: %d of the graph's %d calls are compiled, in %d segments of which %d are "
                         "distinct", report.compiled,
                         report.calls, report.segments, report.different)
                return compat.mark_boxed(blocks.run(made))
        if not self.inductor:
            return boxed(torch.fx.GraphModule(gm, gm.graph).forward) if self.reuse else interpreted(gm)
        ((_, call),) = compile_in_order([self._whole(bare(gm), inputs, is_backward, is_inference)], ahead)
        return call

    def _ahead(self, gm: GraphModule, results: Sequence[str | None]) -> list[CompileJob[Any]]:
        """Jobs for a graph of backward, as it will be compiled: if forward is lowered already, with the strides that this gave
        the saved values. results: names of forward's results."""
        copied = bare(gm)
        if copied is gm or not self.inductor or compat.inductor_cache_folder() is None:
            return []
        given = dict(zip(results, compat.strides_reported()))
        inputs = [_with_strides(node.meta["val"], given.get(node.name)) for node in copied.graph.find_nodes(op="placeholder")]
        blocks = self._blocks(copied, inputs, True)
        jobs = [self._whole(copied, inputs, True, False)] if blocks is None else [*self._segments(blocks, False).values()]
        return [CompileJob(job.name, functools.partial(_apart, job.compile)) for job in jobs if job.name is not None]

    def _blocks(self, gm: GraphModule, inputs: Any, is_backward: bool) -> RegionalCall | None:
        auto = self.blocks == "auto"
        if self.blocks == "off" or auto and not (self.inductor and self.step_us) or not all(map(_same_layout, values_of(gm),
                                                                                                inputs)):
            return None
        blocks = RegionalCall.of(
            gm, compat.overwritable_inputs() & inputs_alone_in_memory(gm) if is_backward and self.inductor else ())
        return None if blocks is None or auto and not blocks.costs_little(self.step_us) else blocks

    def _whole(self, gm: GraphModule, inputs: Any, is_backward: bool, is_inference: bool) -> CompileJob[Call]:
        """gm: a copy for this job alone, since compiling changes it."""
        inputs = [compat.substitute_symbols(x) for x in inputs]
        output = gm.graph.find_nodes(op="output")[0]
        results = compat.pytree.tree_leaves(output.args, is_leaf=lambda x: x is None)
        visible = len(results) if is_backward or is_inference else self.forward_outputs or 0
        # Under a budget, also inputs that forward returns as they are: inductor would save a copy of a convolution's weight.
        output.meta["user_visible_output_idxs"] = [
            i for i, x in enumerate(results)
            if isinstance(x, torch.fx.Node) and (i < visible or not self.reuse and x.op == "placeholder")
        ]
        # Saved tensors and parameters keep their addresses between calls only for cudagraphs, which are not used here.
        compile_whole = functools.partial(
            compat.compile_with_inductor, gm, inputs, static_inputs=(), is_backward=is_backward, is_inference=is_inference,
            reuse=self.reuse, keep_order=starts_ahead(gm.graph), writes_over=inputs_alone_in_memory(gm))
        return CompileJob(self._name(gm, inputs, is_backward, is_inference), compile_whole)

    def _segments(self, blocks: RegionalCall, is_inference: bool) -> dict[Hashable, CompileJob[Call | None]]:
        return {key: self._segment(segment.graph(blocks.gm), segment.donated, is_inference)
                for key, segment in blocks.parts().items()}

    def _segment(self, gm: GraphModule, donated: Sequence[int], is_inference: bool) -> CompileJob[Call | None]:
        """Compile a segment; None where its results would not have the strides that they were traced with, on which other
        segments rely."""
        if not self.inductor:
            return CompileJob(None, lambda: interpreted(gm))
        (output,) = gm.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        inputs = values_of(gm)

        def compile_segment() -> Call | None:
            traced = [node.meta["val"] for node in output.args[0]]
            # As backward, since inductor overwrites inputs only there.
            with compat.strides_of_results() as strides, compat.allow_overwriting(donated) as can:
                call = compat.compile_with_inductor(gm, inputs, static_inputs=(), is_backward=can, is_inference=is_inference,
                                                    reuse=self.reuse, keep_order=starts_ahead(gm.graph))
            return call if all(map(_has_strides, traced, strides or [None] * len(traced))) else None

        return CompileJob(self._name(gm, inputs, False, is_inference), compile_segment)

    def _name(self, gm: GraphModule, inputs: Sequence[Any], is_backward: bool, is_inference: bool) -> str | None:
        return job_key(gm, inputs, is_backward, is_inference, self.reuse) if self.shares else None


def lowering_of_part(compiler: str, shares: bool, blocks: Wanted = "off") -> Lowering:
    """Lowering for a part of the graph that AOTAutograd sees."""
    lowering = Lowering(compiler, blocks=blocks)
    lowering.shares = shares
    lowering.reuse = lowering.inductor  # the interpreter frees each value after its last use
    return lowering


def _apart(compile_whole: Callable[[], Any]) -> Any:
    """Compile while another graph is being compiled, whose strides are recorded, without adding to that record."""
    with compat.strides_of_results():
        return compile_whole()


def _names_returned(gm: GraphModule) -> list[str | None]:
    return [None if node is None else node.name for node in returned_nodes(gm)]


def _with_strides(value: Any, strides: Any) -> Any:
    """strides: None for non-tensors, and for tensors that keep their own."""
    if strides is None or tuple(map(int, strides)) == tuple(value.stride()):
        return value
    return value.as_strided(value.shape, tuple(map(int, strides)))


def _has_strides(value: torch.Tensor, strides: Any) -> bool:
    """True if strides place a tensor's elements where its own do. strides: None for non-tensors, or if unchanged."""
    return strides is None or all(size == 1 or own == int(other) for size, own, other in zip(
        value.shape, value.stride(), strides, strict=True))


def _same_layout(traced: Any, given: Any) -> bool:
    """True if an input has the layout it was traced with: lowering forward may have changed the strides of saved values."""
    if not isinstance(traced, torch.Tensor) or not isinstance(given, torch.Tensor):
        return traced is given
    return traced.shape == given.shape and _has_strides(traced, given.stride())
