"""Records of a plan's description. Times are in µs and bytes of one device, of a whole step, unless a name says otherwise."""
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hpml_compiler.visualize.description.placement_words import Words, dims_text, words_text

COMPUTE, COMMUNICATION, RECOMPUTE, OPTIMIZER, OVERHEAD, WAITING = (
    "compute", "communication", "recomputation and offloading", "optimizer", "call overhead", "waiting for other stages")
"""Parts of a step, in the order in which they are shown."""


@dataclass(frozen=True)
class CommunicationSummary:
    """Collectives on one axis. by_kind: time by collective."""

    us: float
    bytes: float
    count: float
    by_kind: dict[str, float]


@dataclass(frozen=True)
class AxisSummary:
    """A mesh axis. links: which its groups use, "" if unknown. splits: words for what it splits, the most frequent first."""

    name: str
    size: int
    links: str
    splits: tuple[str, ...]
    communication: CommunicationSummary


@dataclass(frozen=True)
class ParameterSummary:
    """A parameter of the module that stands for its class. words: how it is split in use, or what is done to one that is stored
    in parts and used whole; stored: in words, as it is stored; placements: DTensor's notation of
    that."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    words: Words
    stored: Words
    placements: tuple[str, ...]
    bytes_whole: int
    bytes_per_device: int


@dataclass(frozen=True)
class ModuleSummary:
    """A class of equal modules, its figures summed over them. sharding: for each axis, words for its parameters, largest first,
    then for its values. saved_bytes: of one microbatch, where its backward follows it. read_by: the modules that read its
    parameters, if it has no operations."""

    name: str
    path: str
    count: int
    stage: int | None
    sharding: dict[str, tuple[str, ...]]
    parameters: tuple[ParameterSummary, ...]
    parameter_count: int
    parameter_bytes: int
    compute_us: float
    communication: dict[str, CommunicationSummary]
    saved_bytes: int
    recompute_us: float
    offloaded_bytes: int
    read_by: tuple[str, ...] = ()

    @property
    def communication_us(self) -> float:
        return sum(each.us for each in self.communication.values())


@dataclass(frozen=True)
class MessageSummary:
    """A tensor that a stage sends for one microbatch. dims: its sizes, if they are known."""

    value: str
    dims: str
    bytes: int
    backward: bool


@dataclass(frozen=True)
class StageSummary:
    """A pipeline stage. devices: which ranks run it; forward_us, backward_us: of one microbatch; parts: of a step, which
    together with those of the other stages of its rank add up to it; memory: bytes by part at its rank's peak, with what other
    stages of the rank have in memory then."""

    number: int
    rank: int
    devices: str
    forward_us: float
    backward_us: float
    parts: dict[str, float]
    memory: dict[str, int]
    in_flight: int
    sends: tuple[MessageSummary, ...]

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def busy_us(self) -> float:
        return sum(us for part, us in self.parts.items() if part != WAITING)


@dataclass(frozen=True)
class CollectiveSummary:
    """Collectives of one kind over one axis along an edge."""

    kind: str
    axis: str
    bytes: float
    us: float
    count: float


@dataclass(frozen=True)
class EdgeSummary:
    """The largest value that a module reads from another one in forward. tail, head: numbers of the modules. bytes,
    backward_bytes: of the value and of its gradient, on a device."""

    tail: int
    head: int
    value: str
    dims: str
    words: Words
    bytes: int
    backward_bytes: int
    collectives: tuple[CollectiveSummary, ...]


@dataclass(frozen=True)
class OutputSummary:
    """A result of the model, as it is returned. module: which makes it. words: how it stays split until the script reads it."""

    value: str
    module: str
    dims: str
    words: Words
    bytes: int

    def __str__(self) -> str:
        shape, split = dims_text(self.dims) or self.value, words_text(self.words)
        return f"{shape} of {self.module} split ({split}), gathered only if it is read"


@dataclass(frozen=True)
class StepSummary:
    """The step of one graph. parts: they add up to step_us, with stages as means over their ranks. bound, gap: of the solver's
    objective. at: where the memory peak is. loss: in how many chunks it is computed, or why in none; "" if unknown. outputs:
    those that are known."""

    name: str
    training: bool
    step_us: float
    parts: dict[str, float]
    communication_us: float
    status: str
    bound: float | None
    gap: float | None
    objective: str
    memory: dict[str, int]
    at: str
    microbatches: int
    schedule: str
    bubble: float
    modules: tuple[ModuleSummary, ...]
    stages: tuple[StageSummary, ...]
    edges: tuple[EdgeSummary, ...]
    replicated: dict[str, str]
    not_split: str
    loss: str
    outputs: tuple[OutputSummary, ...] = ()


@dataclass(frozen=True)
class PlanDescription:
    """A plan for people. memory: bytes by part at the peak of a step, peak_bytes: their sum. limit_bytes: the memory budget or
    the device's memory, as limit_name says; None if it is unknown."""

    devices: int
    cluster: str
    torch_version: str
    mesh: dict[str, int]
    step_us: float
    axes: tuple[AxisSummary, ...]
    memory: dict[str, int]
    peak_bytes: int
    limit_bytes: int | None
    limit_name: str
    steps: tuple[StepSummary, ...]
    rejected: tuple[dict[str, Any], ...]
    unplanned: tuple[dict[str, Any], ...]
    seconds: dict[str, float]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_share(self) -> float | None:
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return asdict(self)
