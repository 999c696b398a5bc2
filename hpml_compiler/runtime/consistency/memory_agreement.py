"""Calls of graphs that run out of memory on all ranks or on none.

A rank that fails inside a graph leaves its peers in the graph's collectives. It joins those that are left with zeros, and at
the end of each half all ranks tell each other whether they failed. If one has, the results are dropped on all: nobody has used
them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.out_of_memory import OutOfMemoryOnRank, free_memory, memory_failure
from hpml_compiler.runtime.process.world_group import memory_group, this_rank
from hpml_compiler.runtime.program.dummy_collectives import begun, collectives_of, take_part
from passes import compat

Boxed = Callable[[list[Any]], Any]


def agreeing_on_memory(gm: GraphModule) -> Callable[[Boxed], Boxed]:
    """Make a wrapper for the calls of one half of a graph. To be called before it is compiled, which changes it."""
    collectives = collectives_of(gm)

    def around(call: Boxed) -> Boxed:
        def run(arguments: list[Any]) -> Any:
            before, failure, results = begun(collectives), "", None
            try:
                results = call(arguments)
            except Exception as error:
                failure = memory_failure(error)
                if not failure:
                    raise
            if failure:  # the error, and the values that its frames held, are freed
                arguments.clear()
                free_memory()
                take_part(collectives, before, torch.device(device_type()))
            _agree(failure)
            return results

        return compat.mark_boxed(run)

    return around


def _agree(failure: str) -> None:
    failed = torch.tensor(this_rank() + 1 if failure else 0, dtype=torch.int32)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=memory_group())
    if rank := int(failed):
        raise OutOfMemoryOnRank(f"rank {rank - 1}: {failure or 'it ran out of memory'}", f"rank {rank - 1}",
                                "use fewer rows, or a memory_budget")
