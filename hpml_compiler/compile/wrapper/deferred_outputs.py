"""Deferred outputs of a graph on one device: large results beside the loss are computed when the script first reads them.

Where a script reads them often, forward computes them again: once reading has taken as long as compiling the graph did, it is
compiled a second time with all outputs. Now and then a call defers them all the same, to see whether they are still read.
Where a compiled function takes them, forward computes them from the next call on.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule

from hpml_compiler.runtime.outputs.deferred_output import DeferredCall, DeferredOutput
from hpml_compiler.runtime.outputs.kept_inputs import AllCopies, KeptInputs, can_be_watched
from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.transforms.outputs.split_outputs import OutputSplit, split_outputs

WORTH = 1.0
"""The graph is compiled with all outputs once computing them has taken this many times the seconds of compiling it."""
CALLS_UNTIL_CHECK = 16
Call = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any]], Call]


def with_deferred_outputs(gm: GraphModule, given: Sequence[Any], compile_: Compile) -> Call:
    """Compile a graph so that its outputs are deferred where that saves memory."""
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in given if isinstance(x, torch.Tensor))
    if not plain or not torch.is_grad_enabled() or compat.ends_in_a_break(gm):
        return compile_(gm, given)
    split = split_outputs(gm)
    if split is None or not can_be_watched():
        return compile_(gm if split is None else split.whole, given)
    compat.trace_after(DeferredOutput, DeferredOutput.read_by_dynamo)
    start = time.perf_counter()
    first = compile_(gm, given)
    fixed = not any(isinstance(x, torch.SymInt) for x in given)
    return _DeferringGraph(split, first, compile_ if fixed else None, time.perf_counter() - start).call


class _DeferringGraph:
    """compile_: compiles the whole graph; None where its sizes are not fixed, so that only Dynamo can. compile_s: seconds that
    compiling the first graph took."""

    def __init__(self, split: OutputSplit, first: Call, compile_: Compile | None, compile_s: float) -> None:
        self.split, self.first, self.compile = split, first, compile_
        results = [node for node in returned_nodes(split.rest) if node is not None]
        self.like: list[torch.Tensor] = [node.meta["example_value"] for node in results]
        self.what = f"output {', '.join(map(str, results))} of the model"
        self.modes = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                      for device in {x.device.type for x in self.like}]
        self.copies: AllCopies = WeakValueDictionary()
        self.left_s = WORTH * compile_s
        self.calls = self.last_deferred = self.last_read = 0
        self.whole: Call | None = None
        self.stopped = False

    @compat.untraced
    def call(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.compile is not None and (self.stopped or self._is_worth_it()):
            if self.whole is None:
                self.whole = self.compile(self.split.whole, arguments)
            return self.whole(*arguments)
        results = list(self.first(*arguments))
        count = len(results) - self.split.sources
        sources, results = results[count:], results[:count]
        nodes = {x.grad_fn for x in (*results, *sources) if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        outputs = self._outputs(sources, [arguments[k] for k in self.split.takes], nodes)
        for position, place in self.split.places:
            results.insert(position, outputs[place])
        return results

    def _is_worth_it(self) -> bool:
        return self.last_deferred == self.last_read > 0 and self.left_s <= 0 and self.calls % CALLS_UNTIL_CHECK > 0

    def stop(self) -> None:
        self.stopped = True

    def _outputs(self, sources: Sequence[torch.Tensor], arguments: Sequence[Any], nodes: Iterable[Any],
                 ) -> Sequence[torch.Tensor]:
        if self.stopped or compat.inside_transform():
            return self._compute(sources, arguments)
        self.last_deferred = number = self.calls
        kept = KeptInputs(arguments, self.copies, self.what)
        for node in nodes:
            node.register_prehook(kept.copy_after_backward())

        def compute() -> Sequence[torch.Tensor]:
            start = time.perf_counter()
            values = self._compute(sources, kept.values())
            self.left_s -= time.perf_counter() - start
            self.last_read = number
            return values

        made = DeferredCall(compute, self.stop)
        shaped = self._of_sizes(sources, arguments)
        return [DeferredOutput(like, x.shape, x.stride(), made, k)
                for k, (like, x) in enumerate(zip(self.like, shaped, strict=True))]

    def _of_sizes(self, sources: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Tensors without data, of the shapes and strides of this call's outputs."""
        if self.compile is not None:
            return self.like
        with torch.no_grad():
            meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in (*sources, *arguments)]
            return self._compute(meta[:len(sources)], meta[len(sources):])

    def _compute(self, sources: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.modes:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            return self.split.rest(*sources, *arguments)
