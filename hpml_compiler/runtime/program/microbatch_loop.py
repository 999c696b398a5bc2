"""Run a step microbatch by microbatch, inside one forward and one backward of autograd.

Where the loss is computed inside, both run in forward, one microbatch after the other, so that only one microbatch's saved
values are in memory (`hpml_compiler.runtime.program.fused_forward_backward`). Where it is computed outside, forward saves the
values of all microbatches.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes.graph.loops.loop_order import AFTER, BACKWARD, BEFORE, FORWARD, loop_parts, read_later
from passes.graph.loops.loop_parts import GraphFragment, LoopInput, LoopOutput, PrologueEpilogue
from passes.transforms.microbatch.loop_markers import place_of, taken

Call = Callable[[list[Any]], Any]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoopCalls:
    """Compiled parts of a loop; None for a part without calls. saved: for each saved value that backward takes, in its order,
    the place among the values that forward saves."""

    before: tuple[Call | None, Call | None]
    forward: Call
    backward: Call | None
    after: tuple[Call | None, Call | None]
    saved: tuple[int, ...] = ()


class Collector:
    """Concatenates or sums one result over the microbatches. in_place: whether the first microbatch's result may be added to
    in place."""

    def __init__(self, what: LoopOutput, microbatches: int, in_place: bool):
        self.what, self.microbatches, self.in_place = what, microbatches, in_place
        self.total: torch.Tensor | None = None

    def add(self, part: torch.Tensor, number: int) -> None:
        rows = self.what.rows
        if rows is not None:
            if self.total is None:
                self.total = part.new_empty(rows.size)
            place = place_of(self.total, rows.apart, rows.dim, number)
            place.copy_(part.reshape(place.shape))
        elif self.total is None:
            self.total = part.to(self.what.dtype)
        elif self.in_place:
            self.total.add_(part)
        else:
            self.total = self.total + part

    def result(self) -> torch.Tensor:
        assert self.total is not None and self.what.value is not None, "there is at least one microbatch"
        return self.total.to(self.what.value.dtype)


class MicrobatchLoop:
    """Runs the parts of a loop in order, on values by node name."""

    def __init__(self, loop: PrologueEpilogue, calls: LoopCalls, microbatches: int):
        self.loop, self.calls, self.microbatches = loop, calls, microbatches
        made = frozenset(name for part in loop_parts(loop, True) for name in part.makes)
        self.over = {at_once: {part: made - later for part, later in read_later(loop, at_once).items()}
                     for at_once in (True, False)}
        """By `at_once` and part of the loop: values that nothing reads after that part."""

    @property
    def parts(self) -> list[int]:
        """Number of values in each list that `all_forward` returns."""
        return [len(self.calls.saved)] * self.microbatches

    def segment(self, half: int, when: str, values: Values, at_once: bool = False) -> None:
        part: GraphFragment = getattr(self.loop, when)[half]
        call = getattr(self.calls, when)[half]
        if call is not None:
            values.update(zip(part.makes, call([values[name] for name in part.reads]), strict=True))
            self.let_go((BEFORE if when == "before" else AFTER)[half], values, at_once)

    def let_go(self, part: str, values: Values, at_once: bool) -> None:
        """Drop values that are not read after this part of the loop."""
        for name in self.over[at_once][part]:
            values.pop(name, None)

    def reads(self, reads: Iterable[LoopInput], values: Mapping[str, torch.Tensor], number: int) -> list[torch.Tensor]:
        return [values[r.name] if r.rows is None else
                taken(values[r.name], r.rows.apart, r.rows.dim, r.rows.size, number) for r in reads]

    def collectors(self, what: Sequence[LoopOutput], in_place: bool) -> list[Collector]:
        return [Collector(each, self.microbatches, in_place) for each in what]

    def forward(self, values: Values, number: int, collectors: Sequence[Collector]) -> list[torch.Tensor]:
        """Forward of one microbatch; returns the values it saves."""
        made = list(self.calls.forward(self.reads(self.loop.reads, values, number)))
        for collector, part in zip(collectors, made[:len(collectors)], strict=True):
            collector.add(part, number)
        return made[len(collectors):]

    def backward(self, saved: list[torch.Tensor], values: Values, number: int, collectors: Sequence[Collector]) -> None:
        if self.calls.backward is None:
            return
        given = [saved[place] for place in self.calls.saved] + self.reads(self.loop.late, values, number)
        saved.clear()
        made = list(self.calls.backward(given))
        while made:  # from the end, each freed once it is added
            collectors[len(made) - 1].add(made.pop(), number)

    def collect(self, collectors: Sequence[Collector], values: Values) -> None:
        for collector in collectors:
            values[collector.what.name] = collector.result()
            collector.total = None

    def at_once(self, values: Values) -> None:
        """The full step: forward and backward of one microbatch after the other."""
        for half in (0, 1):
            self.segment(half, "before", values, at_once=True)
        made, gradients = self.collectors(self.loop.forward, False), self.collectors(self.loop.backward, True)
        for number in range(self.microbatches):
            self.backward(self.forward(values, number, made), values, number, gradients)
        self.collect(made, values)
        self.collect(gradients, values)
        self.let_go(BACKWARD, values, at_once=True)
        for half in (0, 1):
            self.segment(half, "after", values, at_once=True)

    def all_forward(self, values: Values, saves: bool = True) -> list[list[torch.Tensor]]:
        """Forward of all microbatches; returns the saved values of each, or nothing without `saves`."""
        self.segment(0, "before", values)
        made, saved = self.collectors(self.loop.forward, False), []
        for number in range(self.microbatches):
            own = self.forward(values, number, made)
            saved += [own] if saves else []
        self.collect(made, values)
        self.let_go(FORWARD, values, at_once=False)
        self.segment(0, "after", values)
        return saved

    def all_backward(self, saved: list[list[torch.Tensor]], values: Values) -> None:
        self.segment(1, "before", values)
        gradients = self.collectors(self.loop.backward, True)
        for number in range(self.microbatches):
            own, saved[number] = saved[number], []
            self.backward(own, values, number, gradients)
        self.collect(gradients, values)
        self.let_go(BACKWARD, values, at_once=False)
        self.segment(1, "after", values)

    def results(self, values: Mapping[str, torch.Tensor], names: Iterable[str | None]) -> list[torch.Tensor | None]:
        return [None if name is None else values[name] for name in names]


class SplitForwardBackward:
    """forward returns the graph's forward outputs, the values that backward needs around the loop, named in `kept`, and the
    saved values of each microbatch. saved: examples of these."""

    def __init__(self, schedule: MicrobatchLoop, forward_outputs: int, saved: Sequence[Any]):
        self.schedule, self.forward_outputs = schedule, forward_outputs
        self.kept = saved_for_backward(schedule.loop, forward_outputs)
        self.as_taken = numbers_first(range(len(saved)), saved)

    def forward(self, arguments: list[Any]) -> list[Any]:
        loop = self.schedule.loop
        names = [name for name in loop.inputs if not name.startswith("tangents")]
        values = dict(zip(names, arguments, strict=True))
        arguments.clear()
        saved = self.schedule.all_forward(values)
        results = self.schedule.results(values, loop.results[:self.forward_outputs])
        return [*results, *numbers_last([*(values[name] for name in self.kept), *(x for own in saved for x in own)])]

    def backward(self, arguments: list[Any]) -> list[Any]:
        loop = self.schedule.loop
        given = in_order(self.as_taken, arguments)
        values = dict(zip(self.kept, given, strict=False))
        tangents = [name for name in loop.inputs if name.startswith("tangents")]
        values.update(zip(tangents, arguments[len(given):], strict=True))
        arguments.clear()
        saved, first = [], len(self.kept)
        for count in self.schedule.parts:
            saved.append(given[first:first + count])
            first += count
        given.clear()
        self.schedule.all_backward(saved, values)
        return self.schedule.results(values, loop.results[self.forward_outputs:])


def in_order(places: Sequence[int], arguments: Sequence[Any]) -> list[Any]:
    """The first arguments, each at its place. No variable refers to one afterwards, so that it can be freed while backward
    runs."""
    return [value for _, value in sorted(zip(places, arguments, strict=False), key=operator.itemgetter(0))]


def numbers_last(values: Sequence[Any], like: Sequence[Any] | None = None) -> list[Any]:
    """Tensors before numbers: AOTAutograd's order for the values that a forward graph saves. like: values to sort by."""
    return _sorted(values, values if like is None else like, False)


def numbers_first(values: Sequence[Any], like: Sequence[Any] | None = None) -> list[Any]:
    """Numbers before tensors: AOTAutograd's order for the inputs of a backward graph. like: values to sort by."""
    return _sorted(values, values if like is None else like, True)


def _sorted(values: Sequence[Any], like: Sequence[Any], numbers: bool) -> list[Any]:
    are = [not isinstance(x, torch.Tensor) for x in like]
    return [x for which in (numbers, not numbers) for x, its in zip(values, are, strict=True) if its is which]


def saved_for_backward(loop: PrologueEpilogue, forward_outputs: int) -> tuple[str, ...]:
    """Names of the values that backward reads from forward, without the saved values of microbatches."""
    there = {name for name in loop.inputs if not name.startswith("tangents")}
    there.update(loop.before[0].makes, loop.after[0].makes, (each.name for each in loop.forward))
    read = [*loop.before[1].reads, *(each.name for each in loop.late), *loop.after[1].reads,
            *(name for name in loop.results[forward_outputs:] if name is not None)]
    return tuple(dict.fromkeys(name for name in read if name in there))
