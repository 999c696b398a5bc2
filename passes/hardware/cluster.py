"""The machines: nodes of devices, the links inside and between them, parsed, described in JSON, or found here."""
from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from passes.errors import BadInput, shortened
from passes.hardware.control_groups import available_cores, memory_bytes
from passes.hardware.device import (
    ASSUMED_HOST,
    ASSUMED_STORAGE,
    Device,
    DeviceSheet,
    Link,
    builtin_devices,
    builtin_sheet,
    did_you_mean,
    host_of,
    sheet_for_torch_name,
)
from passes.json_records import FrozenMap, from_json, read_json, to_json, write_json

__all__ = ["Cluster", "Device", "DeviceSheet", "Link", "NodeGroup", "builtin_devices", "builtin_sheet"]

_PATTERN = re.compile(r"(?:([0-9]+)x)?([0-9]+):(.+)")
_JOINT = re.compile(r"\+(?=\s*(?:[0-9]+x)?[0-9]+:)")  # not a + in a file's name
MOST_DEVICES, MOST_GROUPS = 2**20, 10
"""Limits of a cluster: several times the largest number of devices ever; the number of groups that the share search handles."""
LOCAL_MEMORY_BANDWIDTH_BYTES_PER_S = 200e9  # shared by the cores of one host: about eight channels of DDR4-3200


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes: `nodes` times `devices_per_node` devices.

    intra_node: the link between devices of one node; inter_node: the NICs through which a node reaches the others;
    host: between a device and its host's memory; storage: to the file system. For the last two, as for the NICs,
    `device_bytes_per_s(devices_per_node)` is the bandwidth of each device while all devices of its node use them.
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    host: Link = ASSUMED_HOST
    storage: Link = ASSUMED_STORAGE

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", host_of(self.device, self.host))
        if self.nodes < 1 or self.devices_per_node < 1:
            raise BadInput(
                f"a cluster needs at least one node and one device, got {self.nodes}x{self.devices_per_node}", "cluster",
                "write NODESxDEVICES:DEVICE, such as 8x8:h100-80g",
            )
        if self.size > MOST_DEVICES:
            raise BadInput(_too_many(), "cluster", "name a smaller cluster")

    @staticmethod
    def of(nodes: int, devices_per_node: int, sheet: DeviceSheet) -> NodeGroup:
        """Equal nodes, with the links of the device file."""
        return NodeGroup(nodes, devices_per_node, sheet.device, sheet.intra_node, sheet.inter_node, sheet.host,
                         sheet.storage)

    @property
    def size(self) -> int:
        """Devices in the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes; ranks count through devices, then nodes, then groups.

    same_node: the groups are different devices of one and the same node. between_groups: the link between devices of
    different groups, `device_bytes_per_s` of which is taken with the larger devices_per_node; None with one group. Left
    out, it is the slowest of the groups' inter_node links (intra_node links if same_node), with the longest latency.
    Meshes are laid over one group of like nodes; the properties from `nodes` on raise BadInput for several groups.
    """

    groups: tuple[NodeGroup, ...]
    between_groups: Link | None = None
    same_node: bool = False

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadInput("a cluster needs at least one group of nodes", "cluster", "add a group")
        if len(self.groups) > MOST_GROUPS:
            raise BadInput(f"the cluster has {len(self.groups)} groups of different devices, and shares are searched for up "
                           f"to {MOST_GROUPS}", "cluster", "put like nodes into one group")
        if self.world_size > MOST_DEVICES:
            raise BadInput(_too_many(), "cluster", "name a smaller cluster")
        if self.same_node and any(group.nodes != 1 for group in self.groups):
            raise BadInput("same_node is true, but a group has several nodes", "cluster",
                           "give every group of the node nodes = 1, or leave same_node out")
        if len(self.groups) == 1 and (self.between_groups is not None or self.same_node):
            raise BadInput("between_groups and same_node are of several groups, and there is one", "cluster",
                           "leave them out")
        if len(self.groups) > 1 and self.between_groups is None:
            object.__setattr__(self, "between_groups", _slowest_link(self.groups, self.same_node))

    @staticmethod
    def homogeneous(nodes: int, devices_per_node: int, sheet: DeviceSheet) -> Cluster:
        """Equal nodes, with the links of the device file."""
        return Cluster((NodeGroup.of(nodes, devices_per_node, sheet),))

    @staticmethod
    def parse(text: str) -> Cluster:
        """`NODESxDEVICES:DEVICE` (`8x8:h100-80g`; DEVICE: a built-in one or a device file), `DEVICES:DEVICE` for one node, or a
        cluster file (.json).

        Several of the first kind joined by `+` (`1x4:h100-80g+1x4:a100-80g`) are groups of different nodes.
        Raises BadInput with the problem and the built-in devices.
        """
        parts = [part.strip() for part in _JOINT.split(text.strip())]
        matches = [_PATTERN.fullmatch(part) for part in parts]
        if parts == [text.strip()] and matches == [None] and parts[0].endswith(".json"):
            return Cluster.load(parts[0])
        groups = []
        for part, match in zip(parts, matches, strict=True):
            if match is None:
                raise BadInput(
                    f"cannot read {shortened(part)!r} as a cluster"
                    + (f" in {shortened(text)!r}" if len(parts) > 1 else "")
                    + did_you_mean(part.rpartition(":")[2], "1x8:"),
                    "cluster",
                    "write NODESxDEVICES:DEVICE, such as 8x8:h100-80g, or 4:h100-80g for one node, several joined by +, or the "
                    f"path of a JSON file; built-in devices: {', '.join(builtin_devices())}",
                )
            nodes, devices, device = match.groups(default="1")
            if len(nodes.lstrip("0")) + len(devices.lstrip("0")) > 2 * len(str(MOST_DEVICES)):  # too long to be multiplied
                raise BadInput(_too_many(), f"cluster {shortened(part)}", "name a smaller cluster")
            groups.append(NodeGroup.of(int(nodes), int(devices), _sheet(device)))
        return Cluster(tuple(groups))

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Reads a cluster file: `{"groups": [{"nodes", "devices_per_node", "device", "intra_node", "inter_node"}]}`.

        `device` is an object, or the name of a built-in device or the path of a device file, relative to this one;
        with a name or path the links may be left out. The links `host` and `storage` may always be left out, and so
        may `between_groups` and `same_node` beside the groups. Strict: raises BadInput that names the file and the key.
        """
        data = read_json(path)
        if isinstance(data, dict) and isinstance(data.get("groups"), list):
            data = {**data, "groups": [_with_sheet(group, Path(path).parent) for group in data["groups"]]}
        return from_json(Cluster, data, str(path))

    def save(self, path: str | Path) -> None:
        """Write a complete cluster file, devices and links included."""
        write_json(to_json(self), path)

    @staticmethod
    def local(
        world_size: int,
        device_type: str,
        *,
        device_name: str = "",
        devices_per_node: int | None = None,
        memory_bytes: int | None = None,
    ) -> Cluster:
        """The machine this runs on, as `world_size` ranks use it.

        device_type: "cpu" (the ranks share the cores, the memory and its bandwidth) or "cuda". device_name:
        `torch.cuda.get_device_name()`. devices_per_node: ranks on one node, all by default. memory_bytes: of one
        device, if known better (`torch.cuda.mem_get_info`). A GPU that is not built in is priced as an
        a100-40g, with a warning.
        """
        per_node = world_size if devices_per_node is None else devices_per_node
        if world_size < 1 or per_node < 1 or world_size % per_node:
            raise BadInput(
                f"{world_size} ranks are no whole number of nodes with {per_node} ranks each",
                "local cluster",
                "start the same number of ranks on every node",
            )
        if device_type == "cpu":
            sheet = _local_cpu(per_node)
        elif device_type == "cuda":
            sheet = _local_gpu(device_name)
        else:
            raise BadInput(f"unknown device type {device_type!r}", "local cluster", "legal types: cpu, cuda")
        if memory_bytes is not None:
            sheet = replace(sheet, device=replace(sheet.device, memory_bytes=memory_bytes))
        return Cluster.homogeneous(world_size // per_node, per_node, sheet)

    @property
    def world_size(self) -> int:
        """Total number of devices."""
        return sum(group.size for group in self.groups)

    @property
    def group(self) -> NodeGroup:
        """The only group of nodes; raises BadInput where there are several."""
        if len(self.groups) != 1:
            raise BadInput(
                f"the cluster has {len(self.groups)} groups of different nodes",
                "cluster",
                "lay a mesh over like nodes only: give a cluster of one group",
            )
        return self.groups[0]

    @property
    def nodes(self) -> int:
        return self.group.nodes

    @property
    def devices_per_node(self) -> int:
        return self.group.devices_per_node

    @property
    def device(self) -> Device:
        return self.group.device

    @property
    def intra_node(self) -> Link:
        return self.group.intra_node

    @property
    def inter_node(self) -> Link:
        return self.group.inter_node

    def __str__(self) -> str:
        return " + ".join(f"{g.nodes}x{g.devices_per_node}:{g.device.name}" for g in self.groups)


def _sheet(device: str, folder: Path = Path()) -> DeviceSheet:
    return DeviceSheet.load(folder / device) if device.endswith(".json") else builtin_sheet(device)


def _with_sheet(group: Any, folder: Path) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("device"), str):
        return group
    sheet = to_json(_sheet(group["device"], folder))
    links = {name: sheet[name] for name in ("intra_node", "inter_node", "host", "storage")}
    return {**links, **group, "device": sheet["device"]}


def _too_many() -> str:
    return f"more than {MOST_DEVICES:,} devices, which is the most that hpml plans for"


def _slowest_link(groups: tuple[NodeGroup, ...], same_node: bool) -> Link:
    """The path of a message from one group to another: both groups' links, of which the slower one counts."""
    links = [(group.intra_node if same_node else group.inter_node, group.devices_per_node) for group in groups]
    slowest, _ = min(links, key=lambda each: each[0].device_bytes_per_s(each[1]))
    return replace(slowest, latency_us=max(link.latency_us for link, _ in links))


def _local_cpu(ranks: int) -> DeviceSheet:
    """The built-in cpu (one core, one rank) for ranks that share this host's cores."""
    sheet, cores = builtin_sheet("cpu"), available_cores()
    one, share = sheet.device, cores / ranks
    shared_bandwidth = min(cores * one.memory_bandwidth_bytes_per_s, LOCAL_MEMORY_BANDWIDTH_BYTES_PER_S)
    device = replace(
        one,
        memory_bytes=memory_bytes() // ranks,
        memory_bandwidth_bytes_per_s=shared_bandwidth / ranks,
        peak_flops_per_s=FrozenMap({dtype: rate * share for dtype, rate in one.peak_flops_per_s.items()}),
        idle_power_w=one.idle_power_w * share,
        busy_power_w=one.busy_power_w * share,
        caches=tuple(replace(cache, bandwidth_bytes_per_s=cache.bandwidth_bytes_per_s * share) for cache in one.caches),
        source=f"{cores} cores shared by {ranks} ranks, each core: {one.source}",
    )
    # Ranks beyond the cores take turns, in messages as in arithmetic (4 ranks on 2 cores: half the bandwidth measured).
    turn = min(share, 1.0)
    link = sheet.intra_node
    link = replace(
        link, latency_us=link.latency_us / turn, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * turn
    )
    return replace(sheet, device=device, intra_node=link)


def _local_gpu(device_name: str) -> DeviceSheet:
    sheet = sheet_for_torch_name(device_name)
    if sheet is None:
        warnings.warn(
            f"no built-in device matches {device_name!r}: its costs are those of an a100-40g. "
            f"Describe it in a JSON file to have it priced; built-in devices: {', '.join(builtin_devices())}",
            stacklevel=3,
        )
        sheet = builtin_sheet("a100-40g")
    return sheet
