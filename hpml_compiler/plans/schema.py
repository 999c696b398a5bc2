"""The parts of a plan: frozen, validated records that hold numbers and strings only.

Placements are strings, one per mesh axis in the mesh's order: "R" (replicate), "P" (partial sum), "M" (partial max),
"S(d)" (dim d sharded) and "S(d.k)" (factor k of dim d sharded, such as the heads inside a flattened hidden dim; "S(d)"
is factor 0). An empty list of placements stands for something that is no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.memory_records import MemoryBytes, Peak
from hpml_compiler.plans.pipeline_records import MicrobatchPlan, PipelinePlan
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
"""The block of what is in no submodule, such as a loss."""


@dataclass(frozen=True)
class CollectiveTotal:
    """How often a kind of collective runs in one step, and the sum of its payloads in bytes per device."""

    count: int
    bytes: int


class ParameterPlan(Record):
    """One parameter (or buffer): its whole shape, how it is stored, its bytes whole and, as it is stored, on one (the fullest)
    device, and the node that its gradient is ("" where it has none, or nobody said). `held`: how it is held besides, where it
    is gathered once per step of the optimizer; empty where it is not."""

    shape: Shape
    dtype: str
    placements: Placements
    trainable: bool
    bytes_whole: Count
    bytes_per_device: Count
    gradient: str = ""
    held: Placements = ()


class OperationPlan(Record):
    """One node of the joint graph. `inputs` and `outputs` hold the placements of each tensor in order, as the operation
    itself reads and writes them (redistributions lie between). `block` is the path of the repeated block or else the
    module that it, or its forward operation, belongs to (`transformer.h.3`, `lm_head`), or ROOT; `predicted_us` the cost
    of one run; `sources` the nodes, parameters and arguments read, in the order of `inputs`.

    What it is priced by, on one device and for one run: `kind` of kernel, `dtype`, `flops` and `bytes_moved`. Operations
    of one fused kernel are priced as one: the first (or the heavy ones) carry its bytes, the others none. `result_bytes`:
    of each result on one device; `saved`: whether that result is held until backward (what is not is recomputed there
    where backward reads it)."""

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


class HopPlan(Record):
    """One collective over one mesh axis. `bytes` is its payload on one device, the larger of what goes in and what
    comes out; 0 marks a local hop, such as the slice that makes R into S, which is no collective.

    What else it is priced by (`passes.cost_model.cost_terms.Message`): `outer`, for each end that has to be packed or unpacked,
    the number of elements before the dim that is split; `bucket_bytes`, of gradients, those that are reduced together."""

    collective: str
    axis: str
    bytes: Count
    predicted_us: Microseconds
    outer: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    bucket_bytes: Annotated[float, Field(ge=0.0)] = 0.0


class Redistribution(Record):
    """A change of placement between the node, parameter or argument `value` and the node `consumer` ("" is the graph's
    output or the optimizer); it stands for `multiplicity` equal ones in the whole model. `shape` is that of the whole value.
    `held`: the value is a parameter that stays so until the optimizer changes it, so that a step does this once."""

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
    """A node or parameter that the plan leaves replicated although an axis was there, and why."""

    name: str
    reason: str


class PredictedCost(Record):
    """Predicted time of one step on the slowest device; parts may overlap, so they need not sum to the step.
    `overhead_us`: what calling the compiled graphs takes besides their kernels, where it was measured. `again_us`: under a byte
    budget, running calls of forward once more for backward, and moving what is offloaded.

    energy_j: of one step on all devices together (`passes.cost_model.energy_model`), None where nobody computed it;
    energy_label says where its figures come from."""

    step_time_us: Microseconds
    compute_us: Microseconds
    communication_us: Microseconds
    optimizer_us: Microseconds
    overhead_us: Microseconds = 0.0
    again_us: Microseconds = 0.0
    energy_j: Annotated[float, Field(ge=0.0)] | None = None
    energy_label: Literal["estimated", "measured"] | None = None


class SolverReport(Record):
    """What the solver said: status ("optimal", "feasible", ...), objective and proven bound, relative gap, sizes.

    objective: what was minimized. With "energy", `cost` and `bound` are the µJ of one device."""

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

    def without_bound(self) -> SolverReport:
        """The report on an answer to a narrower problem than the one that was asked, about which its bound says nothing."""
        return self.model_copy(update={"status": "feasible", "bound": None, "gap": None})

    def of_another(self) -> SolverReport:
        """The report on an answer that is used in another problem than the one that was solved, with costs of its own."""
        return self.without_bound().model_copy(update={"cost": None})


class UnplannedPart(Record):
    """A part of the step behind a graph break that the plan does not count. where: file and line. parameters: names of the
    trained ones in it, with so many elements."""

    reason: str
    where: str
    parameters: Annotated[tuple[str, ...], Field(strict=False)] = ()
    elements: Count = 0


class MeshAttempt(Record):
    """A mesh that was tried and not taken; `objective` as in `SolverReport`."""

    mesh: Mesh
    cost: float | None
    bound: float | None
    reason: str
    objective: Objective = "time"


class DecisionRecord(Record):
    """What one entity of the partition problem chose: layouts that it reads and makes, axes joined by commas.

    A plan that is passed back pins these; entities that it does not name are solved again."""

    inputs: Annotated[tuple[str | None, ...], Field(strict=False)]
    outputs: Annotated[tuple[str | None, ...], Field(strict=False)]


class BlocksReport(Record):
    """Of one half of a graph, whose equal blocks are compiled once: how many segments run and how many of them differ, how many
    calls it has and how many of them are compiled."""

    segments: Count
    different: Count
    calls: Count
    compiled: Count


class GraphPlan(Record):
    """The plan of one joint graph.

    `parameters` lists every parameter of the model, also of layers whose operations are not listed.

    `multiplicity[class_id]` says how many times in the whole model each *listed* operation of that class runs: 1 (or no
    entry) where every layer's nodes are listed, 32 where one layer is listed for 32. So the time of a step is
    the sum of `predicted_us * multiplicity` over the listed operations, and likewise over redistributions.

    `tangents`: bytes of the gradients that backward is given, one for each result that has one; autograd makes zeros for
    results that the loss does not depend on.

    `rows`: of the batch, where its tensors agree on them; None where they do not, or nobody said.

    `frame` names the piece of the script that the graph was compiled from, "" where that is not known; compiled again,
    the same piece gives another graph of the same frame.

    `kept`: what of forward is kept for backward, where a byte budget decided that; None where none did.

    `microbatches`: how a step goes through its batch, where that is in several parts. Operations and redistributions are listed
    as of the whole batch; `predicted` and `memory` are of the step as it goes.

    `pipeline`: the stages that it goes through, where there are any.

    `at_peak`: the moment at which a device holds most in a step of this graph alone, whose bytes are `memory.peak`; None before
    anybody has asked, and in plans that are written by hand.

    `blocks`: of the halves of it that are compiled in blocks: what of them is. In microbatches, halves are those of one; in
    stages, they are named after these: "stage 0 forward", "stage 0 backward" and, where that is cut in two, "stage 0 weights".
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
    tangents: dict[str, Count] = Field(default_factory=dict)
    rows: Annotated[int, Field(ge=0)] | None = None
    frame: str = ""
    kept: CheckpointingPlan | None = None
    microbatches: MicrobatchPlan | None = None
    pipeline: PipelinePlan | None = None
    at_peak: Peak | None = None
    blocks: dict[str, BlocksReport] = Field(default_factory=dict)

    def runs(self, operation: OperationPlan) -> int:
        """How many times in one step of the whole model the listed `operation` runs."""
        return self.multiplicity.get(operation.class_id, 1)

    @property
    def collectives(self) -> dict[str, CollectiveTotal]:
        """Collectives of one step by kind; local hops (0 bytes) are not counted."""
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
        for name, operation in self.operations.items():
            yield from ((f"operation {name!r}", each) for each in (*operation.inputs, *operation.outputs))
        for move in self.redistributions:
            yield from ((f"redistribution of {move.value!r}", each) for each in (move.source, move.target))


def collective_totals(redistributions: Iterable[Redistribution]) -> dict[str, CollectiveTotal]:
    """Count and payload bytes per device of one step by kind of collective, sorted by kind."""
    totals: dict[str, CollectiveTotal] = {}
    for move in redistributions:
        for hop in move.hops:
            if hop.bytes:
                old = totals.get(hop.collective, CollectiveTotal(0, 0))
                totals[hop.collective] = CollectiveTotal(
                    old.count + move.multiplicity, old.bytes + move.multiplicity * hop.bytes
                )
    return dict(sorted(totals.items()))
