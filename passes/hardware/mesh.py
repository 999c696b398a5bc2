"""Meshes: the devices of a cluster as a grid, each axis priced by the links that it uses."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod

from passes.errors import BadInput
from passes.hardware.axis import Axes, Axis
from passes.hardware.cluster import Cluster
from passes.hardware.device import Device, Link
from passes.hardware.link import BOARD_J_PER_BYTE, SYSTEM_J_PER_BYTE
from passes.json_records import FrozenMap

AXIS_NAMES = ("x", "y", "z", "w")
"""Names of enumerated axes, outer first: they do not imply a purpose."""

INSIDE, BETWEEN, BOTH = "inside a node", "between nodes", "inside and between nodes"
"""The links that the groups of an axis use."""


@dataclass(frozen=True)
class AxisLevel:
    """The part of an axis in one level of the hierarchy: `size` devices (or nodes), and the latency and bandwidth of each."""

    size: int
    latency_us: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh.

    All groups of an axis communicate at once. latency_us: one hop of a ring through a group, on average.
    bandwidth_bytes_per_s: sustained by a ring through a group, per device and direction. levels: for an axis that
    runs inside nodes and across them, the two parts, inner first; their bandwidths are per device while all
    use the link. slowdown: of the slowest link (see `passes.hardware.link.Link`). energy_j_per_byte: of one hop of a ring, on
    average.
    """

    name: str
    size: int
    latency_us: float
    bandwidth_bytes_per_s: float
    levels: tuple[AxisLevel, ...] = ()
    slowdown: FrozenMap[str, float] = FrozenMap()
    energy_j_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 1 or self.latency_us <= 0 or self.bandwidth_bytes_per_s <= 0:
            raise BadInput(f"size, latency and bandwidth must be positive: {self}", f"mesh axis {self.name!r}",
                           "mend the links of the cluster")
        if self.levels and prod(level.size for level in self.levels) != self.size:
            raise BadInput(f"the sizes of the levels do not multiply to {self.size}", f"mesh axis {self.name!r}",
                           "leave the levels out, or give sizes that multiply to the axis")

    def __hash__(self) -> int:  # short, since the costs of collectives are cached by axis
        return hash((self.name, self.size, self.latency_us))


@dataclass(frozen=True)
class Mesh:
    """A grid of equal devices; rank = row-major index, so neighbors on the last axis have adjacent ranks."""

    axes: tuple[MeshAxis, ...]
    device: Device

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise BadInput(f"axis names repeat: {', '.join(names)}", "mesh", "name each axis once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        """Devices in all; 1 for a mesh without axes."""
        return prod(self.shape)

    @property
    def layout_axes(self) -> Axes:
        """The axes for layouts, without costs."""
        return tuple(Axis(axis.name, axis.size) for axis in self.axes)

    def axis(self, name: str) -> MeshAxis:
        """The axis of that name; raises KeyError."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(f"no axis {name!r} in the mesh; its axes: {', '.join(self.names) or 'none'}")

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank, one per axis; raises IndexError."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not in a mesh of {self.size}")
        result: list[int] = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            result.append(index)
        return tuple(reversed(result))

    def rank(self, coordinates: tuple[int, ...]) -> int:
        """The inverse of `coordinates`."""
        if len(coordinates) != len(self.axes):
            raise IndexError(f"{coordinates} is not in a mesh of shape {self.shape}")
        rank = 0
        for index, size in zip(coordinates, self.shape, strict=True):
            if not 0 <= index < size:
                raise IndexError(f"{coordinates} is not in a mesh of shape {self.shape}")
            rank = rank * size + index
        return rank

    def groups(self, name: str) -> list[list[int]]:
        """The ranks of each group of an axis, in order along it."""
        position = self.axes.index(self.axis(name))
        stride = prod(self.shape[position + 1 :])
        size = self.shape[position]
        starts = (r for r in range(self.size) if r // stride % size == 0)
        return [[start + i * stride for i in range(size)] for start in starts]

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one device"


def enumerate_meshes(cluster: Cluster, max_axes: int = 2) -> list[Mesh]:
    """Every mesh of 1 to `max_axes` axes longer than 1: all ordered factorizations of the world, fewest axes first.

    A world of one device has the mesh without axes.
    """
    if not 1 <= max_axes <= len(AXIS_NAMES):
        raise BadInput(f"max_axes must be 1 to {len(AXIS_NAMES)}, got {max_axes}", "enumerate_meshes", "2 is usual")
    world = cluster.world_size
    if world == 1:
        return [_mesh((), cluster)]
    shapes = [shape for axes in range(1, max_axes + 1) for shape in factorizations(world, axes)]
    return [_mesh(tuple(zip(AXIS_NAMES, shape, strict=False)), cluster) for shape in shapes]


def mesh_from_pin(pin: Mapping[str, int], cluster: Cluster) -> Mesh:
    """The mesh with the pinned axes, in that order, outer first; an axis may have size 1.

    Raises BadInput if the sizes do not multiply to the world; it says both numbers and the factorizations there are.
    """
    for name, size in pin.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadInput(f"{name!r} is no name for an axis", "mesh", "use a word, such as dp or tp")
        if type(size) is not int or size < 1:
            raise BadInput(f"the size of axis {name!r} must be an integer of at least 1, got {size!r}", "mesh", "write dp=2")
    world, product = cluster.world_size, prod(pin.values())
    if product != world:
        shapes = list(islice(factorizations(world, len(pin)), 13)) or list(factorizations(world, 1))
        listed = ", ".join(" x ".join(map(str, shape)) for shape in shapes[:12]) + (", ..." if len(shapes) > 12 else "")
        shown = " x ".join(f"{name}={size}" for name, size in pin.items()) or "no axes"
        raise BadInput(
            f"the mesh {shown} has {product} devices, the world has {world}",
            "mesh",
            f"choose sizes that multiply to {world}: {listed or '1'} (axes of size 1 may be added)",
        )
    return _mesh(tuple(pin.items()), cluster)


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """The ordered ways to write `number` as a product of `count` factors above 1, in ascending order."""
    if count == 0:
        if number == 1:
            yield ()
        return
    if count > 1 and number < 2**count:  # nothing is left for the further factors
        return
    for first in _divisors(number) if count > 1 else (number,) * (number > 1):
        for rest in factorizations(number // first, count - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    """Those above 1, in ascending order."""
    small = [first for first in range(1, math.isqrt(number) + 1) if number % first == 0]
    return sorted({*small, *(number // first for first in small)} - {1})


def _mesh(axes: tuple[tuple[str, int], ...], cluster: Cluster) -> Mesh:
    priced = []
    stride = cluster.world_size
    for name, size in axes:
        stride //= size
        priced.append(price_axis(name, size, stride, cluster))
    return Mesh(tuple(priced), cluster.device)


def price_axis(name: str, size: int, stride: int, cluster: Cluster) -> MeshAxis:
    """The axis whose groups are `size` ranks, `stride` apart.

    Inside a node, the link of the node. Across nodes with one member in each, a NIC, shared by the devices of the node
    that share it, since the groups they belong to all communicate. Both inside and across (g members in each node):
    a ring enters and leaves each node g-fold, through the NICs of its members, as NCCL builds one ring per NIC, so
    its bandwidth is that of the node's link or g shares of the NICs, whichever is less; hops are priced by their mean.
    Groups that do not fit the nodes evenly are priced as if every hop crossed.
    """
    per_node, intra, inter = cluster.devices_per_node, cluster.intra_node, cluster.inter_node
    intra_bandwidth, inter_bandwidth = intra.device_bytes_per_s(per_node), inter.device_bytes_per_s(per_node)
    intra_j = BOARD_J_PER_BYTE if intra.energy_j_per_byte is None else intra.energy_j_per_byte
    inter_j = SYSTEM_J_PER_BYTE if inter.energy_j_per_byte is None else inter.energy_j_per_byte
    links = _links(size, stride, per_node)
    if links == INSIDE:
        return _single(name, size, intra, intra_bandwidth, intra_j)
    if links == BETWEEN:
        return _single(name, size, inter, inter_bandwidth, inter_j)
    members = per_node // stride
    nodes = size // members
    return MeshAxis(
        name,
        size,
        (nodes * inter.latency_us + (size - nodes) * intra.latency_us) / size,
        min(intra_bandwidth, inter_bandwidth * members),
        (
            AxisLevel(members, intra.latency_us, intra_bandwidth),
            AxisLevel(nodes, inter.latency_us, inter_bandwidth),
        ),
        inter.slowdown,
        (nodes * inter_j + (size - nodes) * intra_j) / size,
    )


def _links(size: int, stride: int, per_node: int) -> str:
    span, members = size * stride, per_node // stride
    if size == 1 or per_node % span == 0:
        return INSIDE
    return BETWEEN if members <= 1 or per_node % stride or span % per_node else BOTH


def links_of_axes(shape: Mapping[str, int], devices_per_node: int) -> dict[str, str]:
    """The links that the groups of each axis use, as `price_axis` prices them; the first axis is the outermost."""
    found, stride = {}, prod(shape.values())
    for name, size in shape.items():
        stride //= size
        if size > 1:
            found[name] = _links(size, stride, devices_per_node)
    return found


def _single(name: str, size: int, link: Link, bandwidth: float, energy_j_per_byte: float) -> MeshAxis:
    return MeshAxis(name, size, link.latency_us, bandwidth, (), link.slowdown, energy_j_per_byte)
