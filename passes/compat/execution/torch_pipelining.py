"""Action orders of torch's own pipeline schedules."""
from __future__ import annotations

from types import SimpleNamespace

import torch

from passes.errors import BadInput

Ordered = tuple[str, int, int]
"""(kind, stage, microbatch); kind: "F" forward, "B" backward, or its halves: "I" gradients of inputs, "W" of weights."""


def schedule_order(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[Ordered]]:
    """Computations of each rank, in order, by a schedule of `torch.distributed.pipelining` with several stages a rank.

    The classes are public, and so is the attribute with the order. The attributes of a stage that they read are not: the number
    of stages, and its index; a stub stage provides them. Raises BadInput for numbers that torch rejects.
    """
    from torch.distributed import pipelining

    where = f"torch.distributed.pipelining.{name}"
    kind = getattr(pipelining, name, None)
    if kind is None:
        raise BadInput(f"torch {torch.__version__} has no {name}", where, "take another schedule, or another torch")
    stages = [SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, stage_index=k * ranks, submod=None)
              for k in range(virtual)]
    try:
        order = kind(stages, microbatches).pipeline_order
    except ValueError as error:
        raise BadInput(str(error), where, "give another number of microbatches or stages") from error
    return [[(action.computation_type.value, action.stage_index, action.microbatch_index)
             for action in order[rank] if action is not None] for rank in range(ranks)]
