"""Records of a plan for microbatches, chunks of the loss, and pipeline stages."""
from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.record_fields import Count, Microseconds, Names, Record


class MicrobatchPlan(Record):
    """Split of a step into a loop over microbatches. count: number of microbatches. share: share of the per-row work, by
    estimated time, that is in the loop, 0 to 1.

    Names of operations: before, after: run once on the whole batch, before or after the loop; all others are in the loop. sums:
    accumulated over microbatches, such as gradients, so their size does not shrink with the rows. whole: operations outside of
    the loop that read rows, most expensive first; they stay outside because their rows depend on each other or on results
    that are known only after the loop.

    gathered, reduced: names of the sharded parameters that each microbatch gathers, and of those whose gradients each of them
    reduces; the others are gathered once before the loop, and reduced once after it. repeated: operations on gathered
    parameters that each microbatch repeats, whose size does not shrink with the rows.

    loss_inside: the loss is computed in the graph, so backward of a microbatch follows its forward. Otherwise forward of all
    microbatches runs first, and the activations of all of them are in memory."""

    count: Annotated[int, Field(ge=2)]
    share: Annotated[float, Field(ge=0.0, le=1.0)]
    before: Names = ()
    after: Names = ()
    sums: Names = ()
    whole: Names = ()
    gathered: Names = ()
    reduced: Names = ()
    repeated: Names = ()
    loss_inside: bool = True


class LossChunksPlan(Record):
    """Chunks of the loss. count: number of chunks of rows; 1 computes it at once. head: the operation that makes the
    logits, from which on it is in chunks; "" where it is at once. reason: why it is at once."""

    count: Annotated[int, Field(ge=1)] = 1
    head: str = ""
    reason: str = ""


class SentPlan(Record):
    """A tensor that a stage sends to another rank for one microbatch. value, bytes: its name and size. backward: it goes to the
    previous stage, in backward."""

    value: str
    bytes: Count
    backward: bool


class StagePlan(Record):
    """One pipeline stage. rank: coordinate on the axis pp of the ranks that run it. operations: how many times it runs each
    listed operation for one microbatch (operations outside of the loop: once). parameters, parameter_bytes: parameters whose
    gradients it completes, and their bytes. forward_us, backward_us, send_us (to the next stage), return_us (to the previous
    stage), saved_bytes: per microbatch. in_flight: the largest number of microbatches with saved activations at a time;
    resident_bytes: of its parameters, of all their gradients and of their optimizer state, as they are stored. They are not all
    in memory when the most activations are, so that the peak (see kept) can be below resident_bytes + saved_bytes * in_flight.
    weight_us: the part of backward_us for weight gradients, where the schedule runs it separately; saved_bytes is then the
    larger of the bytes before that part and after the other part of backward, so saved_bytes * in_flight is an upper bound.
    kept: what it saves for backward, for all microbatches of a step, and its peaks, with what other stages of its rank have in
    memory then. parts: µs of a step that it computes, waits for its collectives, recomputes (or waits for offloading) and
    runs the optimizer, as "compute", "communication", "recompute", "optimizer"; empty if they are unknown."""

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
    resident_bytes: Count
    sends: Annotated[tuple[SentPlan, ...], Field(strict=False)]
    kept: CheckpointingPlan | None = None
    parts: dict[str, Microseconds] = Field(default_factory=dict)

    @property
    def again_us(self) -> float:
        """Time of recomputation and offloading in a step."""
        return 0.0 if self.kept is None else self.kept.again_us + self.kept.offload_us


class PipelinePlan(Record):
    """A step in pipeline stages. schedule: its name in `passes.pipeline.schedule_orders`. ranks: size of the axis pp. step_us:
    time of the schedule alone, without the operations around its loop and without the optimizer. bubble: average share of
    step_us in which a rank is idle, 0 to 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
    ranks: Annotated[int, Field(ge=1)]
    microbatches: Annotated[int, Field(ge=1)]
    step_us: Microseconds
    bubble: Annotated[float, Field(ge=0.0, le=1.0)]
    stages: Annotated[tuple[StagePlan, ...], Field(strict=False)]

    @property
    def virtual_stages(self) -> int:
        """Number of stages per rank."""
        return len(self.stages) // self.ranks
