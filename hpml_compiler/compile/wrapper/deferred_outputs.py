"""Deferred outputs of a graph: large results beside the loss are computed when the script first reads them.

Where a script reads them often, forward computes them again: once reading has taken as long as compiling the graph did, it is
compiled a second time with all outputs. Now and then a call defers them all the same, to see whether they are still read.
Where a compiled function takes them, forward computes them from the next call on.

On several ranks, the calls that compute them from the hidden states, which stay sharded, are recorded as if the script had made
them (`hpml_compiler.runtime.outputs.record`). All ranks do the same, so calls are counted there, not seconds.

Where hooks take what autograd saves, as in `torch.utils.checkpoint`, nothing is deferred: a checkpoint counts what each call
saves.
"""
from __future__ import annotations

import abc
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor.placement_types import Replicate
from torch.fx import GraphModule

from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput, OutputState, lazy_output
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.outputs.call_modes import Modes
from hpml_compiler.runtime.outputs.deferred_output import DeferredCall, DeferredOutput, watch_deferred
from hpml_compiler.runtime.outputs.kept_inputs import AllCopies, KeptInputs, can_be_watched
from hpml_compiler.runtime.outputs.output_wrapper import OutputUse, OutputUses
from hpml_compiler.runtime.outputs.record import AllRecords
from hpml_compiler.runtime.outputs.recorded_output import OutputRecorder, RecordedOutput
from hpml_compiler.session import session
from passes import compat
from passes.errors import HpmlError, Infeasible
from passes.graph.fx_nodes import returned_nodes
from passes.session_state import state_of
from passes.transforms.outputs.split_outputs import OutputSplit, split_outputs

log = logging.getLogger("hpml")
WORTH = 1.0
"""The graph is compiled with all outputs once computing them has taken this many times the seconds of compiling it."""
CALLS_UNTIL_CHECK = 16
READS_ON_RANKS = 4
"""On several ranks, the graph is compiled with all outputs once they were read in this many calls in a row."""
Call = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any]], Call]


def with_deferred_outputs(gm: GraphModule, given: Sequence[Any], compile_: Compile, whole: Compile) -> Call:
    """Compile a graph so that its outputs are deferred where that saves memory. whole: compiles it with all outputs, where the
    script reads them."""
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in given if isinstance(x, torch.Tensor))
    if not plain or not _may_defer(gm):
        return compile_(gm, given)
    split = split_outputs(gm)
    if split is None or not can_be_watched():
        return compile_(gm if split is None else split.whole, given)
    watch_deferred()
    start, name = time.perf_counter(), session.current().next_name()
    first = compile_(gm, given)
    fixed = not any(isinstance(x, torch.SymInt) for x in given)
    return _DeferringGraph(name, split, first, whole if fixed else None, time.perf_counter() - start).call


def with_outputs_of_ranks(gm: GraphModule, given: Sequence[Any], compile_: Compile, whole: Callable[[GraphModule], Call],
                          compile_options: str) -> Call:
    """The same on several ranks. whole: compiles the graph with all outputs, when it is called. compile_options: of graphs for
    what is called on sharded outputs."""
    kinds = {type(x) for x in given if isinstance(x, torch.Tensor)}
    plain = kinds <= {torch.Tensor, torch.nn.Parameter, PlacedTensor}
    if not plain or not _may_defer(gm):
        return compile_(gm, given)
    split = split_outputs(gm)
    if split is None:
        return compile_(gm, given)
    name, first = session.current().next_name(), compile_(gm, given)
    return _RecordingGraph(name, split, first, whole, compile_options).call


def _may_defer(gm: GraphModule) -> bool:
    return torch.is_grad_enabled() and not compat.ends_in_a_break(gm) and not compat.saving_is_hooked()


class _SplitGraph(abc.ABC):
    """A graph whose large outputs were split off. calls: that were made; last_read: the latest whose outputs were read. uses:
    what the script does with each result of the rest. is_kept_split: all outputs at once do not fit into the budget."""

    def __init__(self, name: str, split: OutputSplit, first: Call) -> None:
        self.split, self.first = split, first
        results = [node for node in returned_nodes(split.rest) if node is not None]
        self.like: list[torch.Tensor] = [node.meta["example_value"] for node in results]
        self.what = f"output {', '.join(map(str, results))} of the model"
        self.modes = Modes(self.like[0].device.type)  # those that are in force now
        self.calls = self.last_read = 0
        self.whole: Call | None = None
        self.is_kept_split = False
        places, known = {place: position for position, place in reversed(split.places)}, state_of(OutputUses)
        stay = [k for k in range(len(returned_nodes(split.whole))) if k not in dict(split.places)]
        known.move(name, dict(enumerate(stay)))
        self.uses = [known.of(name, places[k], str(node)) for k, node in enumerate(results)]

    @compat.untraced
    def call(self, *arguments: Any) -> Any:
        self.calls += 1
        for use in self.uses:
            use.calls += 1
        if not self.is_kept_split and self._computes_all():
            made = self._all(arguments)
            if made is not None:
                return made
        results = list(self.first(*arguments))
        own = len(results) - self.split.added
        outputs = self._outputs(results, own, [arguments[k] for k in self.split.takes])
        del results[own:]
        for position, place in self.split.places:
            results.insert(position, outputs[place])
        return results

    def _all(self, arguments: Sequence[Any]) -> Any:
        """The results of the graph with all outputs; None where these do not fit into the memory budget."""
        first = self.whole is None
        if self.whole is None:
            self.whole = self._compile_whole(arguments)
        try:
            results = self.whole(*arguments)
        except Exception as error:
            reason = getattr(error, "inner_exception", None) or error.__cause__ or error
            if not first or not isinstance(reason, Infeasible):
                raise
            log.info("%s is read often, but is still computed by itself when it is read: with it, %s", self.what, reason.what)
            self.whole, self.is_kept_split = None, True
            return None
        self._note_made()
        return results

    def _note_made(self) -> None:
        for use in self.uses:
            use.made += 1

    @abc.abstractmethod
    def _computes_all(self) -> bool:
        """True if forward computes all outputs in this call."""

    @abc.abstractmethod
    def _compile_whole(self, arguments: Sequence[Any]) -> Call:
        """The graph with all outputs, compiled."""

    @abc.abstractmethod
    def _outputs(self, results: Sequence[Any], own: int, takes: Sequence[Any]) -> Sequence[Any]:
        """The outputs that were split off. results: of the first graph, of which those from `own` on are no output."""


class _DeferringGraph(_SplitGraph):
    """On one device. compile_: compiles the whole graph; None where its sizes are not fixed, so that only Dynamo can.
    compile_s: seconds that compiling the first graph took."""

    def __init__(self, name: str, split: OutputSplit, first: Call, compile_: Compile | None, compile_s: float) -> None:
        super().__init__(name, split, first)
        self.compile, self.left_s = compile_, WORTH * compile_s
        self.copies: AllCopies = WeakValueDictionary()
        self.last_deferred, self.stopped = 0, False

    def _computes_all(self) -> bool:
        worth = self.last_deferred == self.last_read > 0 and self.left_s <= 0 and self.calls % CALLS_UNTIL_CHECK > 0
        return self.compile is not None and (self.stopped or worth or compat.saving_is_hooked())

    def _compile_whole(self, arguments: Sequence[Any]) -> Call:
        assert self.compile is not None
        return self.compile(self.split.whole, arguments)

    def stop(self) -> None:
        self.stopped = True

    def _outputs(self, results: Sequence[Any], own: int, takes: Sequence[Any]) -> Sequence[torch.Tensor]:
        sources = [results[k] for k in self.split.sources]
        if self.stopped or compat.inside_transform() or compat.saving_is_hooked():
            self._note_made()
            return self._compute(sources, takes)
        nodes = {x.grad_fn for x in (*results[:own], *sources) if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        self.last_deferred = number = self.calls
        kept, versions = KeptInputs(takes, self.copies, self.what), [x._version for x in sources]
        for node in nodes:
            node.register_prehook(kept.copy_after_backward())

        def compute() -> Sequence[torch.Tensor]:
            start = time.perf_counter()
            if any(x._version != version for x, version in zip(sources, versions, strict=True)):
                raise HpmlError(f"{self.what} cannot be computed any more: a hidden state that the model returned, too, was "
                                "changed in place since", "an output of the compiled model",
                                'read the output before that (as in logits = logits.clone()), or set outputs="whole"')
            values = self._compute(sources, kept.values())
            self.left_s -= time.perf_counter() - start
            self.last_read = number
            self._note_made()
            return values

        made = DeferredCall(compute, self.stop)
        shaped = self._of_sizes(sources, takes)
        return [DeferredOutput(like, x.shape, x.stride(), made, k, use=use)
                for k, (like, x, use) in enumerate(zip(self.like, shaped, self.uses, strict=True))]

    def _of_sizes(self, sources: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Tensors without data, of the shapes and strides of this call's outputs."""
        if self.compile is not None:
            return self.like
        with torch.no_grad():
            meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in (*sources, *arguments)]
            return self._compute(meta[:len(sources)], meta[len(sources):])

    def _compute(self, sources: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        with self.modes.again():
            return self.split.rest(*sources, *arguments)


class _RecordingGraph(_SplitGraph):
    """On several ranks. reads: calls in a row whose outputs were read."""

    def __init__(self, name: str, split: OutputSplit, first: Call, whole: Callable[[GraphModule], Call],
                 compile_options: str) -> None:
        super().__init__(name, split, first)
        self._make_whole, self._recorder = whole, OutputRecorder(compile_options)
        self._mesh, self.reads = session.current().mesh, 0

    def _computes_all(self) -> bool:
        return self.reads >= READS_ON_RANKS or compat.saving_is_hooked()

    def _compile_whole(self, arguments: Sequence[Any]) -> Call:
        return self._make_whole(self.split.whole)

    def _outputs(self, results: Sequence[Any], own: int, takes: Sequence[Any]) -> Sequence[Any]:
        state_of(AllRecords).end()
        with self.modes.again():
            sources = [self._as_sharded(results[k]) for k in self.split.sources]
            outputs = self.split.rest(*sources, *takes)
        at_once = any(k < own and not isinstance(results[k], LazyOutput) for k in self.split.sources)
        for output, use in zip(outputs, self.uses, strict=True):
            if at_once and isinstance(output, RecordedOutput):  # the script may write to a hidden state unnoticed
                output.read()
            if isinstance(output, RecordedOutput) and "value" not in vars(output):
                output.is_output = True
                output.record.on_need[output.number] = functools.partial(self._note_read, self.calls, use)
            else:
                self.reads = READS_ON_RANKS
                use.made += 1
        return outputs

    def _as_sharded(self, source: torch.Tensor) -> torch.Tensor:
        """A hidden state that each rank has in full, as an output like those that are sharded: what is called on it is
        recorded, too."""
        if isinstance(source, LazyOutput) or not self._mesh:
            return source
        mesh = session.current().device_mesh(self._mesh)
        spec = compat.interned_spec(compat.dtensor_spec(mesh, [Replicate()] * mesh.ndim, source))
        return lazy_output(source, spec, OutputState("a hidden state of the model", None, self._recorder))

    def _note_read(self, call: int, use: OutputUse) -> None:
        use.made += 1
        use.note_read()
        if call != self.last_read:
            self.reads = self.reads + 1 if call == self.last_read + 1 else 1
            self.last_read = call
