"""Calls of graphs that run out of memory on all ranks or on none.

A rank that fails inside a graph leaves its peers in the graph's collectives. It joins those that are left with zeros, and at
the end of each half all ranks tell each other whether they failed. If one has, the results are dropped on all: nobody has used
them.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.out_of_memory import OutOfMemoryOnRank, free_memory, memory_failure
from hpml_compiler.runtime.process.world_group import memory_group, this_rank
from hpml_compiler.runtime.program.dummy_collectives import DummyCollective, begun, collectives_of, take_part
from hpml_compiler.runtime.program.microbatch_loop import LoopCalls, MicrobatchLoop, Values
from passes import compat
from passes.graph.loops.loop_parts import PrologueEpilogue

Boxed = Callable[[list[Any]], Any]
T = TypeVar("T")


def agreeing_on_memory(gm: GraphModule) -> Callable[[Boxed], Boxed]:
    """Make a wrapper for the calls of one half of a graph. To be called before it is compiled, which changes it."""
    collectives = collectives_of(gm)

    def around(call: Boxed) -> Boxed:
        return compat.mark_boxed(lambda arguments: _agreed(collectives, lambda: call(arguments), arguments.clear))

    return around


@dataclass(frozen=True)
class LoopCollectives:
    """Collectives of the parts of a loop over microbatches: around it, by half, and in the halves of its body."""

    before: tuple[Sequence[DummyCollective], Sequence[DummyCollective]]
    body: tuple[Sequence[DummyCollective], Sequence[DummyCollective]]
    after: tuple[Sequence[DummyCollective], Sequence[DummyCollective]]

    @staticmethod
    def of(loop: PrologueEpilogue, forward: GraphModule, backward: GraphModule) -> LoopCollectives:
        """Those of these graphs. To be called before they are compiled, which changes them."""
        (first, second), (third, fourth) = ([collectives_of(part.gm) for part in parts] for parts in (loop.before, loop.after))
        return LoopCollectives((first, second), (collectives_of(forward), collectives_of(backward)), (third, fourth))

    def of_half(self, half: int, microbatches: int) -> list[DummyCollective]:
        return [*self.before[half], *microbatches * [*self.body[half]], *self.after[half]]

    def of_step(self, microbatches: int) -> list[DummyCollective]:
        """Those of both halves, one microbatch after the other."""
        (before, later), (forward, backward), (after, last) = self.before, self.body, self.after
        return [*before, *later, *microbatches * [*forward, *backward], *after, *last]


class AgreeingLoop(MicrobatchLoop):
    """A loop over microbatches that runs out of memory on all ranks or on none. collectives: `LoopCollectives.of` its parts."""

    def __init__(self, loop: PrologueEpilogue, calls: LoopCalls, microbatches: int, collectives: LoopCollectives):
        super().__init__(loop, calls, microbatches)
        self.collectives = collectives

    def at_once(self, values: Values) -> None:
        run = super().at_once
        _agreed(self.collectives.of_step(self.microbatches), lambda: run(values), values.clear)

    def all_forward(self, values: Values, saves: bool = True) -> list[list[torch.Tensor]]:
        run = super().all_forward
        return _agreed(self.collectives.of_half(0, self.microbatches), lambda: run(values, saves), values.clear)

    def all_backward(self, saved: list[list[torch.Tensor]], values: Values) -> None:
        def let_go() -> None:
            saved.clear()
            values.clear()

        run = super().all_backward
        _agreed(self.collectives.of_half(1, self.microbatches), lambda: run(saved, values), let_go)


def _agreed(collectives: Sequence[DummyCollective], run: Callable[[], T], let_go: Callable[[], None]) -> T:
    """The result of `run`, if no rank ran out of memory in it. collectives: those that it begins, in order. let_go: drops what
    it was given."""
    before, failure, results = begun(collectives), "", None
    try:
        results = run()
    except Exception as error:
        failure = memory_failure(error)
        if not failure:
            raise
    if failure:  # the error, and the values that its frames held, are freed
        let_go()
        free_memory()
        take_part(collectives, before, torch.device(device_type()))
    _agree(failure)
    return cast("T", results)


def _agree(failure: str) -> None:
    failed = torch.tensor(this_rank() + 1 if failure else 0, dtype=torch.int32)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=memory_group())
    if rank := int(failed):
        raise OutOfMemoryOnRank(f"rank {rank - 1}: {failure or 'it ran out of memory'}", f"rank {rank - 1}",
                                "use fewer rows, or a memory_budget")
