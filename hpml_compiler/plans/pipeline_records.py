"""How a step goes through its batch in several microbatches, and through stages, as part of a plan."""
from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpml_compiler.plans.record_fields import Count, Microseconds, Names, Record


class MicrobatchPlan(Record):
    """count: of microbatches. share: of the work on rows, by estimated time, that is in their loop, 0 to 1.

    By the names of operations: before, after: done once, whole, before the loop and after it; all others are in it. sums: made
    in the loop in parts that are added up, so that they are as large for fewer rows. whole: of those outside of the loop, where
    rows go in, the dearest first: their rows depend on each other, or on what is known after the loop.

    loss_inside: the loss is computed in the graph, so that backward of a microbatch follows its forward; else forward of all
    comes first, and what all of them save is held."""

    count: Annotated[int, Field(ge=2)]
    share: Annotated[float, Field(ge=0.0, le=1.0)]
    before: Names = ()
    after: Names = ()
    sums: Names = ()
    whole: Names = ()
    loss_inside: bool = True


class SentPlan(Record):
    """What a stage sends to another rank for one microbatch: the value, its bytes, and whether to the stage before it, in
    backward."""

    value: str
    bytes: Count
    backward: bool


class StagePlan(Record):
    """One stage of a pipeline. rank: along the axis pp, that runs it. operations: how often it runs each that is listed, for
    one microbatch (and those that are not in the loop, once). parameters: those whose gradients it makes whole, with their
    bytes. forward_us, backward_us, send_us (to the next stage), return_us (to the one before), saved_bytes: of one
    microbatch; in_flight: the most of which something is saved at a time; memory_bytes: what its rank holds for it then, with
    parameters, gradients and optimizer state as they are stored. weight_us: the part of backward_us for gradients that nobody
    waits for, where the schedule runs it apart; then saved_bytes is the most that is held for a microbatch, before that part or
    after the other one, so that saved_bytes * in_flight is an upper bound."""

    blocks: Names
    rank: Count
    operations: dict[str, Annotated[int, Field(ge=1)]]
    parameters: Names
    parameter_bytes: Count
    forward_us: Microseconds
    backward_us: Microseconds
    weight_us: Microseconds | None = None
    send_us: Microseconds
    return_us: Microseconds
    saved_bytes: Count
    in_flight: Count
    memory_bytes: Count
    sends: Annotated[tuple[SentPlan, ...], Field(strict=False)]


class PipelinePlan(Record):
    """A step that goes through stages. schedule: its name in `passes.pipeline.schedule_orders`; ranks: along the axis pp;
    step_us: of the schedule alone, without what is around its loop and the optimizer; bubble: the share of it in which a rank
    computes nothing, on average, 0 to 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
    ranks: Annotated[int, Field(ge=1)]
    microbatches: Annotated[int, Field(ge=1)]
    step_us: Microseconds
    bubble: Annotated[float, Field(ge=0.0, le=1.0)]
    stages: Annotated[tuple[StagePlan, ...], Field(strict=False)]

    @property
    def virtual_stages(self) -> int:
        """Stages of each rank."""
        return len(self.stages) // self.ranks
