"""Recorded calls: what a script called on sharded outputs, as a tree of the sequences that were seen.

A step that does what an earlier one did walks down the same branch: no fakes run, nothing is compiled.
"""
from __future__ import annotations

import json
import logging
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from hpml_compiler.runtime.outputs.call_keys import REVERSED, fill, refs_in, target_of
from passes import compat
from passes.errors import BadInput, HpmlError, Infeasible
from passes.session_state import state_of

log = logging.getLogger("hpml")
MOST_GRAPHS = 8
"""Graphs that are compiled for one sequence of functions: with other shapes or numbers from then on, it runs on gathered
outputs."""


class CompiledRecords(Counter[Hashable]):
    """Graphs that were compiled for calls on sharded outputs, by the names of the functions. are_running: while one is called,
    or compiled for a call."""

    are_running, is_of_models = False, True


@dataclass(frozen=True)
class RecordedValue:
    """An input or result. fake: for its shape, strides, dtype, device, and whether it needs a gradient. root: the first value
    in the same memory."""

    fake: torch.Tensor
    root: int
    is_input: bool


@dataclass(eq=False)
class RecordedCall:
    """A call after those of its parents. target: the function or method, as FX names it. added: the values that it adds, inputs
    first. results: their numbers, in the order of the flat result; nest: its structure. made: of results that it adds.
    reads_at_once: its results are computed when it is called. children: None for calls that run as they come."""

    parent: RecordedCall | None = None
    func: Callable[..., Any] = operator.pos
    target: Callable[..., Any] | str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    added: tuple[RecordedValue, ...] = ()
    results: tuple[int, ...] = ()
    made: frozenset[int] = frozenset()
    nest: Any = None
    reads_at_once: bool = False
    children: dict[Hashable, RecordedCall | None] = field(default_factory=dict)
    graphs: dict[Hashable, RecordGraph] = field(default_factory=dict)

    def path(self) -> list[RecordedCall]:
        """The calls up to this one, in order."""
        found, at = [], self
        while at.parent is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    def graph(self, wanted: Sequence[int], values: Sequence[RecordedValue]) -> RecordGraph:
        """The calls that some values need."""
        at, key = self, tuple(wanted)
        while at.parent is not None and at.made.isdisjoint(key):
            at = at.parent
        if key not in at.graphs:
            at.graphs[key] = RecordGraph(at.path(), key, values)
        return at.graphs[key]

    def maker(self, number: int) -> RecordedCall:
        """The call that makes a value."""
        at = self
        while at.parent is not None and number not in at.made:
            at = at.parent
        return at

    def name(self) -> str:
        return self.target if isinstance(self.target, str) else self.target.__name__

    def after(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], values: Sequence[RecordedValue],
              new: Sequence[torch.Tensor], fakes: compat.FakeCalls) -> RecordedCall | None:
        """A further call, from what it does on fakes; None if it cannot be recorded. values: those so far. new: tensors that
        become inputs."""
        target = target_of(func, args)
        if target is None:
            return None
        known, values = len(values), list(values)
        for x in new:
            values.append(RecordedValue(fakes.like(x), len(values), is_input=True))
        operands = [values[ref.index].fake for ref in refs_in((args, kwargs))]
        result = fakes.call(func, fill(args, lambda k: values[k].fake), fill(kwargs, lambda k: values[k].fake), operands)
        flat, nest = compat.pytree.tree_flatten(result)
        if not flat or not all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in flat):
            return None  # also for NotImplemented
        roots = {compat.storage_key(value.fake): value.root for value in reversed(values)}
        results: list[int] = []
        inputs = len(values)
        for x in flat:
            number = next((k for k, value in enumerate(values) if value.fake is x), len(values))
            if number == len(values):
                values.append(RecordedValue(x, roots.setdefault(compat.storage_key(x), number), is_input=False))
            results.append(number)
        if any(values[k].root >= known and values[values[k].root].is_input and k >= inputs and type(new[
                values[k].root - known]) is torch.Tensor for k in results):
            return None  # a view of a plain argument
        return RecordedCall(self, func, target, args, kwargs, tuple(values[known:]), tuple(results),
                            frozenset(k for k in results if k >= inputs), nest)


class RecordGraph:
    """The calls that the wanted values need, compiled when they are needed for the second time, or at once for gradients.
    inputs: numbers of the values that they start from; between: of those on the way. is_known: True once they were needed.
    reason: why they are not compiled; refusal: the error, where they do not fit into a memory budget."""

    def __init__(self, path: Sequence[RecordedCall], wanted: tuple[int, ...], values: Sequence[RecordedValue]) -> None:
        self.wanted, self.is_known = wanted, False
        self._calls = _needed(path, wanted, ())
        used = {ref.index for call in self._calls for ref in refs_in((call.args, call.kwargs))}
        self.inputs = sorted(k for k in used.union(wanted) if values[k].is_input)
        self.between = frozenset(k for call in self._calls for k in call.made).difference(wanted)
        self._function: Callable[..., Any] | None = None
        self._runs_as_today, self.reason = False, ""
        self.refusal: Infeasible | None = None

    @property
    def is_compiled(self) -> bool:
        return self._function is not None

    def replay(self, known: Mapping[int, Any], input_of: Callable[[int], Any]) -> dict[int, Any]:
        """Make the script's calls. known: values that need no calls."""
        found = dict(known)

        def value(number: int) -> Any:
            if number not in found:
                found[number] = input_of(number)
            return found[number]

        for call in _needed(self._calls, self.wanted, known):
            made = call.func(*fill(call.args, value), **fill(call.kwargs, value))
            found.update(zip(call.results, compat.pytree.tree_leaves(made), strict=True))
        return {k: value(k) for k in self.wanted}

    def compiled(self, arguments: Sequence[Any], compile_: Callable[[GraphModule], Callable[..., Any]]) -> Sequence[Any] | None:
        """The wanted values, from a graph that `compile_` compiles; None if these calls are not compiled."""
        if self._runs_as_today:
            return None
        first, counts = self._function is None, state_of(CompiledRecords)
        if self._function is None:
            names = tuple(call.name() for call in self._calls)
            if counts[names] >= MOST_GRAPHS:
                return self._as_today(f"{counts[names]} graphs were compiled for other shapes or numbers")
            counts[names] += 1
            self._function = compile_(self._module())
        outer, counts.are_running = counts.are_running, True
        try:
            with compat.keeping_saved_values(), compat.forgetting_inputs():  # also where Dynamo compiles it again
                return self._function(*arguments)
        except Exception as error:
            reason = getattr(error, "inner_exception", None) or error.__cause__ or error
            wrong = isinstance(reason, HpmlError) and not isinstance(reason, (BadInput, Infeasible))
            if wrong:
                raise reason from error
            if not first or not compat.is_compile_error(error):
                raise
            if isinstance(reason, Infeasible):
                self.refusal = reason.without_frames()
            return self._as_today(f"{type(reason).__name__}: {reason}".splitlines()[0])
        finally:
            counts.are_running = outer

    def _as_today(self, reason: str) -> None:
        self._runs_as_today, self.reason = True, reason
        log.info("%s on sharded outputs runs on gathered ones: %s", self._calls[-1].name(), reason)

    def _module(self) -> GraphModule:
        graph, nodes = Graph(), {}
        for k in self.inputs:
            nodes[k] = graph.placeholder(f"input_{k}")
        for call in self._calls:
            args, kwargs = fill(call.args, nodes.__getitem__), fill(call.kwargs, nodes.__getitem__)
            name = getattr(call.func, "__name__", "")
            if isinstance(call.target, str):
                made = graph.call_function(getattr, (args[0], call.target)) if name == "__get__" else graph.call_method(
                    call.target, args, kwargs)
            else:
                made = graph.call_function(call.target, args[::-1] if name in REVERSED else args, kwargs)
            for place, k in enumerate(call.results):
                nodes[k] = made if call.nest.is_leaf() else graph.call_function(operator.getitem, (made, place))
        graph.output(tuple(nodes[k] for k in self.wanted))
        return GraphModule(torch.nn.Module(), graph)


def compile_calls(module: GraphModule, options: str, whole: bool) -> Callable[..., Any]:
    """Compile a graph of calls on outputs. options: as JSON. whole: its results are small."""
    given = {**json.loads(options), **({"outputs": "whole"} if whole else {})}
    return torch.compile(module.forward, backend="hpml", options=given, dynamic=False)


def _needed(calls: Sequence[RecordedCall], wanted: Sequence[int], known: Any) -> list[RecordedCall]:
    """The calls that make the wanted values and those that these need."""
    needed, found = set(wanted).difference(known), []
    for call in reversed(calls):
        if not needed.isdisjoint(call.made):
            found.append(call)
            needed.update(ref.index for ref in refs_in((call.args, call.kwargs)) if ref.index not in known)
    return found[::-1]
