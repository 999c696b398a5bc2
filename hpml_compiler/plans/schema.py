"""Records of a plan: frozen and validated, with numbers and strings only.

Placements are strings, one per mesh axis in the mesh's order: "R" (replicate), "P" (partial sum), "M" (partial max),
"S(d)" (dim d sharded) and "S(d.k)" (factor k of dim d sharded, such as the heads inside a flattened hidden dim; "S(d)"
is factor 0). An empty list of placements belongs to a value that is not a tensor.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.memory_records import MemoryBytes, Peak
from hpml_compiler.plans.pipeline_records import LossChunksPlan, MicrobatchPlan, PipelinePlan
from hpml_compiler.plans.record_fields import (
    ClassId,
    Count,
    Mesh,
    Microseconds,
    Names,
    Placements,
    PlacementsOfEach,
    Record,
    Shape,
)

Objective = Literal["time", "energy"]
ROOT = "(root)"
"""The block of operations outside of any submodule, such as a loss."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Number of collectives of one kind in a step, and the sum of their payloads in bytes per device."""

    count: int
    bytes: int


class ParameterPlan(Record):
    """One parameter or buffer. `shape`: of the unsharded tensor; `placements`: how it is stored; `bytes_whole`: unsharded;
    `bytes_per_device`: as stored, on the fullest device; `gradient`: the node of its gradient ("" if it has none or it is
    unknown). `held`: placements of its unsharded copy, which is gathered once per optimizer step; empty if there is none.
    `dims`: sizes and roles of its dims (`passes.op_rules.dim_texts`); `entity`: its key in `GraphPlan.decisions`."""

    shape: Shape
    dtype: str
    placements: Placements
    trainable: bool
    bytes_whole: Count
    bytes_per_device: Count
    gradient: str = ""
    held: Placements = ()
    dims: str = ""
    entity: str = ""


class OperationPlan(Record):
    """One node of the joint graph. `inputs` and `outputs`: placements of each tensor in order, as the operation itself reads
    and writes them (redistributions lie between operations). `block`: path of the repeated block, or else of the module, that
    the operation or its forward operation belongs to (`transformer.h.3`, `lm_head`), or ROOT. `predicted_us`: cost of one run.
    `sources`: nodes, parameters and arguments that it reads, in the order of `inputs`.

    Inputs of the cost model, on one device and for one run: `kind` of kernel, `dtype`, `flops` and `bytes_moved`. Operations
    of one fused kernel are priced as one: the first (or the heavy ones) carry its bytes, the others none. `result_bytes`:
    bytes of each result on one device; `saved`: for each result, true if it is saved for backward (otherwise backward
    recomputes it where it is read); `dims`: of each result, as for parameters."""

    op: str
    block: str
    backward: bool
    class_id: ClassId
    inputs: PlacementsOfEach
    outputs: PlacementsOfEach
    predicted_us: Microseconds
    sources: Names = ()
    kind: str = "pointwise"
    dtype: str = "float32"
    flops: Annotated[float, Field(ge=0.0)] = 0.0
    bytes_moved: Annotated[float, Field(ge=0.0)] = 0.0
    result_bytes: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    saved: Annotated[tuple[bool, ...], Field(strict=False)] = ()
    dims: Names = ()


class HopPlan(Record):
    """One collective over one mesh axis. `bytes`: payload on one device, the larger of its input and its output; 0 marks a
    local operation, such as the slice from R to S, which is no collective.

    More inputs of the cost model (`passes.cost_model.cost_terms.Message`): `outer`: for each end that has to be packed, the
    number of elements before the split dim; `bucket_bytes`: for gradients, the size of the bucket. `compression`: of a
    gradient, such as "bf16", whose bytes without it are `whole_bytes`."""

    collective: str
    axis: str
    bytes: Count
    predicted_us: Microseconds
    outer: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    bucket_bytes: Annotated[float, Field(ge=0.0)] = 0.0
    compression: str = ""
    whole_bytes: Count = 0


class Redistribution(Record):
    """A change of placement between the node, parameter or argument `value` and the node `consumer` ("" for the graph's output
    or the optimizer), from `source` to `target` by the collectives `hops`. `multiplicity`: number of equal ones in the model.
    `shape`: of the unsharded value. `held`: of a parameter whose unsharded copy is kept until the optimizer changes it."""

    value: str
    shape: Shape
    dtype: str
    consumer: str
    source: Placements
    target: Placements
    hops: Annotated[tuple[HopPlan, ...], Field(strict=False)]
    multiplicity: Annotated[int, Field(ge=1)] = 1
    held: bool = False


class ReplicatedValue(Record):
    """A node or parameter that the plan leaves replicated although the mesh could split it, and the reason."""

    name: str
    reason: str


class PredictedCost(Record):
    """Predicted time of one step on the slowest device. Parts may overlap, so they need not sum to the step. `overhead_us`:
    overhead of calling the compiled graphs besides their kernels, where it was measured. `again_us`: under a memory budget,
    time to recompute forward calls in backward and to move offloaded activations.

    energy_j: energy of one step on all devices together (`passes.cost_model.energy_model`), None if it was not computed;
    energy_label: the source of its figures."""

    step_time_us: Microseconds
    compute_us: Microseconds
    communication_us: Microseconds
    optimizer_us: Microseconds
    overhead_us: Microseconds = 0.0
    again_us: Microseconds = 0.0
    energy_j: Annotated[float, Field(ge=0.0)] | None = None
    energy_label: Literal["estimated", "measured"] | None = None


class SolverReport(Record):
    """Result of the solver: status ("optimal", "feasible", ...), cost and proven bound, relative gap, problem size, seconds.
    objective: the minimized quantity. With "energy", `cost` and `bound` are in µJ of one device. simulated_us: the step with
    overlap, where configurations were compared by it: then it is the cost, and simulated_bound_us the bound."""

    status: str
    cost: float | None
    bound: float | None
    gap: Annotated[float, Field(ge=0.0)] | None
    variables: Count
    binaries: Count
    constraints: Count
    seconds: Annotated[float, Field(ge=0.0)]
    solver: str
    objective: Objective = "time"
    simulated_us: Microseconds | None = None
    simulated_bound_us: Microseconds | None = None

    def without_bound(self) -> SolverReport:
        """The report without bound and gap, for a solution of a restricted problem: its bound does not hold in general."""
        return self.model_copy(update={"status": "feasible", "bound": None, "gap": None, "simulated_bound_us": None})

    def of_another(self) -> SolverReport:
        """The report without cost and bound, for a solution that is reused in another problem, where its cost differs."""
        return self.without_bound().model_copy(update={"cost": None, "simulated_us": None})


class UnplannedPart(Record):
    """A part of the model that the plan leaves out. where: file and line. parameters, elements: names of the trainable
    parameters in it and their total number of elements. used: False if the step computes no gradients for them."""

    reason: str
    where: str
    parameters: Annotated[tuple[str, ...], Field(strict=False)] = ()
    elements: Count = 0
    used: bool = True


class MeshAttempt(Record):
    """A mesh that was tried and not chosen, and the reason; `objective` as in `SolverReport`."""

    mesh: Mesh
    cost: float | None
    bound: float | None
    reason: str
    objective: Objective = "time"


class DecisionRecord(Record):
    """Solution of one entity of the sharding problem: its input and output layouts, axes joined by commas ("*": left open).

    A plan that is passed back pins these; entities that it does not name are solved again."""

    inputs: Annotated[tuple[str | None, ...], Field(strict=False)]
    outputs: Annotated[tuple[str | None, ...], Field(strict=False)]


class BlocksReport(Record):
    """Regional compilation of forward or backward of one graph, whose equal blocks are compiled once. segments, different:
    number of segments that run and of distinct ones; calls, compiled: number of calls and of those that are compiled."""

    segments: Count
    different: Count
    calls: Count
    compiled: Count


class GraphPlan(Record):
    """The plan of one joint graph.
    `parameters` lists every parameter of the model, also of layers whose operations are not listed.
    `multiplicity[class_id]`: how many times in the whole model each *listed* operation of that class runs: 1 (or no entry)
    where every layer's nodes are listed, 32 where one layer is listed for 32. So the time of a step is the sum of
    `predicted_us * multiplicity` over the listed operations, and likewise over redistributions.
    `tangents`: bytes of the gradients that backward receives, one for each differentiable output; autograd passes zeros for
    outputs that the loss does not depend on.
    `outputs`: operations whose results, besides the loss, are returned sharded, and their placements.
    `rows`: batch size (dim 0) where the batch's tensors agree on it, else None; `rows_by_rank`: by axis, where unequal.
    `frame`: the code that the graph was compiled from, "" if it is unknown; recompiled graphs have the same frame.
    `kept`: activation checkpointing, where it was decided under a memory budget; else None.
    `microbatches`: the split of the batch into microbatches, if there is one. Operations and redistributions are listed
    for the whole batch; `predicted` and `memory` are those of the split step. `pipeline`: the pipeline stages, if there are
    any. `loss_chunks`: those of the loss, or why there are none; None if unknown. `at_peak`: the memory peak of a step of this
    graph alone, of `memory.peak` bytes; None before it is computed, and in plans that are written by hand.
    `blocks`: regional compilation of forward and backward, where blocks are compiled once. With microbatches they are those of
    one microbatch; with stages the keys are "stage 0 forward", "stage 0 backward" and, where backward is split, "stage 0
    weights".
    """

    graph_hash: str
    name: str
    training: bool
    mesh: Mesh
    parameters: dict[str, ParameterPlan]
    operations: dict[str, OperationPlan]
    redistributions: Annotated[tuple[Redistribution, ...], Field(strict=False)]
    left_whole: Annotated[tuple[ReplicatedValue, ...], Field(strict=False)]
    predicted: PredictedCost
    memory: MemoryBytes
    solver: SolverReport
    seconds: dict[str, Annotated[float, Field(ge=0.0)]]
    multiplicity: dict[ClassId, Annotated[int, Field(ge=1)]]
    decisions: dict[str, DecisionRecord] = Field(default_factory=dict)
    outputs: dict[str, Placements] = Field(default_factory=dict)
    tangents: dict[str, Count] = Field(default_factory=dict)
    rows: Annotated[int, Field(ge=0)] | None = None
    rows_by_rank: dict[str, Shape] = Field(default_factory=dict)
    frame: str = ""
    kept: CheckpointingPlan | None = None
    microbatches: MicrobatchPlan | None = None
    pipeline: PipelinePlan | None = None
    loss_chunks: LossChunksPlan | None = None
    at_peak: Peak | None = None
    blocks: dict[str, BlocksReport] = Field(default_factory=dict)

    def runs(self, operation: OperationPlan) -> int:
        """Number of times that the listed `operation` runs in one step of the whole model."""
        return self.multiplicity.get(operation.class_id, 1)

    @property
    def collectives(self) -> dict[str, CollectiveTotal]:
        """Collectives of one step by kind, without local slices (0 bytes)."""
        return collective_totals(self.redistributions)

    @model_validator(mode="after")
    def _one_placement_per_axis(self) -> GraphPlan:
        for owner, placements in self._all_placements():
            if len(placements) not in (0, len(self.mesh)):
                raise ValueError(f"{owner} has {len(placements)} placements {list(placements)}, "
                                 f"but the mesh {self.mesh} has {len(self.mesh)} axes")
        axes = {hop.axis for move in self.redistributions for hop in move.hops}
        if unknown := sorted(axes - set(self.mesh)):
            raise ValueError(f"redistributions name the axes {unknown}, but the mesh is {self.mesh}")
        return self

    def _all_placements(self) -> Iterable[tuple[str, Placements]]:
        yield from ((f"parameter {name!r}", each) for name, parameter in self.parameters.items()
                    for each in (parameter.placements, parameter.held))
        for name, made in self.operations.items():
            yield from ((f"operation {name!r}", each) for each in (*made.inputs, *made.outputs, self.outputs.get(name, ())))
        for move in self.redistributions:
            yield from ((f"redistribution of {move.value!r}", each) for each in (move.source, move.target))


def collective_totals(redistributions: Iterable[Redistribution]) -> dict[str, CollectiveTotal]:
    """Count and payload bytes per device of one step, by kind of collective, sorted by kind."""
    totals: dict[str, CollectiveTotal] = {}
    for move in redistributions:
        for hop in move.hops:
            if hop.bytes:
                old = totals.get(hop.collective, CollectiveTotal(0, 0))
                totals[hop.collective] = CollectiveTotal(
                    old.count + move.multiplicity, old.bytes + move.multiplicity * hop.bytes)
    return dict(sorted(totals.items()))
