"""Links between devices, to host memory, and to storage; and assumptions about the last two."""
from __future__ import annotations

import math
from dataclasses import dataclass

from passes.errors import BadInput
from passes.json_records import FrozenMap

BOARD_J_PER_BYTE, SYSTEM_J_PER_BYTE = 8 * 10e-12, 8 * 250e-12
"""Energy of a byte from chip to chip on a board, and from node to node: 10 and 250 pJ per bit (Arunkumar et al.,
"MCM-GPU: multi-chip-module GPUs for continued performance scalability", ISCA 2017, table 2)."""


def check_positive(record: object, where: str, *names: str) -> None:
    """Raise BadInput for the first of the fields that is not a positive, finite number."""
    for name in names:
        value = getattr(record, name)
        if not 0 < value < math.inf:
            raise BadInput(f"{name} must be positive and finite, got {value}", where, f"give {name} a number above 0")


@dataclass(frozen=True)
class Link:
    """A link at one level of the hierarchy.

    latency_us: of one message (the α of α-β). bandwidth_bytes_per_s: of one port (NIC), in one direction, as the
    vendor rates it; efficiency: the fraction of it that payload gets. shared_by: devices of a node that share a port.
    slowdown: per kind of collective, how many times longer its bytes take here than the formula in
    `passes.cost_model.collective_costs` says, where that was measured. energy_j_per_byte: that a byte takes on its way, both
    ends included; None: `BOARD_J_PER_BYTE` inside a node, `SYSTEM_J_PER_BYTE` between nodes.
    """

    name: str
    latency_us: float
    bandwidth_bytes_per_s: float
    shared_by: int = 1
    efficiency: float = 1.0
    slowdown: FrozenMap[str, float] = FrozenMap()
    source: str = ""
    energy_j_per_byte: float | None = None

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        object.__setattr__(self, "slowdown", FrozenMap(self.slowdown))
        check_positive(self, where, "latency_us", "bandwidth_bytes_per_s", "shared_by")
        if not 0 < self.efficiency <= 1:
            raise BadInput(f"efficiency must be in (0, 1], got {self.efficiency}", where,
                           "give the fraction of the rated bandwidth that payload gets, such as 0.8")
        for kind, factor in self.slowdown.items():
            if not 0 < factor < math.inf:
                raise BadInput(f"the slowdown of {kind} must be positive, got {factor}", where, "1 is as the formula says")
        if self.energy_j_per_byte is not None and not 0 <= self.energy_j_per_byte < math.inf:
            raise BadInput(f"energy_j_per_byte must be at least 0, got {self.energy_j_per_byte}", where,
                           "leave it out where it is not known")

    def device_bytes_per_s(self, devices_per_node: int) -> float:
        """Bytes/s that each device gets in one direction while all devices of its node use the link."""
        return self.bandwidth_bytes_per_s * self.efficiency / min(self.shared_by, devices_per_node)


ASSUMED_HOST = Link("PCIe 4 x16", 10.0, 32e9, 1, 0.8, source="assumed where a file says nothing: PCI Express 4.0 base "
                    "specification, 16 lanes of 16 GT/s; 0.8 (pinned memory) and latency: estimated")
"""Default link of a GPU to the memory of its host."""

ASSUMED_CPU_HOST = Link("memory of the host", 1.0, 10e9, 1, 1.0, source="assumed where a file says nothing: a copy "
                        "by one core, read and written; estimated")
"""The same for a CPU: a copy within its own memory."""

ASSUMED_STORAGE = Link("one NVMe drive per node", 100.0, 3.0e9, 1024, 0.8, source="assumed where a file says "
                       "nothing: PCIe 3 x4 drives write about 3 GB/s; all devices of a node share it; estimated")
"""Default storage link, for checkpoints."""
