"""Read the hardware facts of one node: processors, memory, caches, GPUs, network ports and NVLink.

Needs no GPU, driver or network: facts that cannot be read are empty, and `remarks` gives the reason.
"""
from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from passes.hardware.control_groups import available_cores, memory_bytes

SYSFS = Path("/sys")
NVLINK_LANE_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}
"""Bandwidth of one link in one direction, by nvmlNvlinkVersion_t (4 and 5: NVLink 3.0 and 3.1; 6: NVLink 4; 7: NVLink 5);
NVIDIA data sheets of V100 (6 links, 150 GB/s), A100 (12, 300), H100 (18, 450) and B200 (18, 900)."""
PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 1e9, 4: 2e9, 5: 4e9, 6: 8e9}
"""Bandwidth of one lane in one direction, by generation (PCI-SIG, rounded as vendors do)."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU: name and memory from torch, links from NVML (0 without NVML or without such links)."""

    name: str
    memory_bytes: int
    nvlink_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Port:
    """A network port of a node. bytes_per_s: in one direction, 0 if unknown."""

    name: str
    bytes_per_s: float
    infiniband: bool


@dataclass(frozen=True)
class NodeFacts:
    """Hardware facts of one node. l3_bytes: sum of its L3 caches. local_ranks: ranks on the node under torchrun, else 0."""

    hostname: str
    processor: str
    cores: int
    memory_bytes: int
    l3_bytes: int
    gpus: tuple[GpuFacts, ...]
    ports: tuple[Port, ...]
    local_ranks: int
    remarks: tuple[str, ...] = ()


def read_node() -> NodeFacts:
    """Read the facts of the node this runs on."""
    gpus, remarks = read_gpus()
    return NodeFacts(
        hostname=socket.gethostname(), processor=_processor(), cores=available_cores(),
        memory_bytes=memory_bytes(), l3_bytes=read_l3_bytes(SYSFS), gpus=gpus,
        ports=(*read_infiniband(SYSFS), *read_interfaces()),
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "0")), remarks=remarks,
    )


def read_gpus() -> tuple[tuple[GpuFacts, ...], tuple[str, ...]]:
    """GPUs that torch sees, with links from NVML, and remarks if these could not be read."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return (), ()
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    gpus = [GpuFacts(p.name, p.total_memory) for p in found]
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return tuple(gpus), ("NVLink and PCIe not read: pip install nvidia-ml-py",)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return tuple(gpus), (f"NVLink and PCIe not read: NVML says {error}",)
    try:
        links = [nvml_links(pynvml, f"GPU-{p.uuid}") for p in found]
    finally:
        pynvml.nvmlShutdown()
    return tuple(GpuFacts(g.name, g.memory_bytes, *pair) for g, pair in zip(gpus, links, strict=True)), ()


def nvml_links(nvml: Any, uuid: str) -> tuple[float, float]:
    """(NVLink, PCIe) bytes/s in one direction of a GPU; 0 if it has none or it is unknown.

    By uuid, since torch numbers the devices in CUDA_VISIBLE_DEVICES and NVML all of them.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:  # a partition of a GPU (MIG) has no links of its own
        return 0.0, 0.0
    nvlink = 0.0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                nvlink += NVLINK_LANE_BYTES_PER_S.get(nvml.nvmlDeviceGetNvLinkVersion(handle, link), 25e9)
        except nvml.NVMLError:  # no such link
            break
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        pcie = PCIE_LANE_BYTES_PER_S.get(generation, 0.0) * nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        pcie = 0.0
    return nvlink, pcie


def read_interfaces() -> tuple[Port, ...]:
    """Network interfaces that are up, except loopback and virtual ones, fastest first."""
    ports = []
    for name, stats in psutil.net_if_stats().items():
        software = name.startswith(("lo", "docker", "br-", "veth", "virbr", "ifb", "tun", "tap", "ib"))
        if stats.isup and not software:
            ports.append(Port(name, max(stats.speed, 0) * 1e6 / 8, infiniband=False))
    return tuple(sorted(ports, key=lambda port: (-port.bytes_per_s, port.name)))


def read_infiniband(sysfs: Path) -> tuple[Port, ...]:
    """Active InfiniBand ports (RoCE too): `class/infiniband/*/ports/*/{state,rate}`, as in `200 Gb/sec (4X HDR)`."""
    ports = []
    for folder in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        state, rate = _text(folder / "state"), _text(folder / "rate").split()
        if "ACTIVE" in state and rate:
            ports.append(Port(f"{folder.parts[-3]}/{folder.name}", float(rate[0]) * 1e9 / 8, infiniband=True))
    return tuple(ports)


def read_l3_bytes(sysfs: Path) -> int:
    """Sum of all L3 caches, each counted once; 0 if unknown."""
    sizes = {}
    for folder in sysfs.glob("devices/system/cpu/cpu[0-9]*/cache/index*"):
        if _text(folder / "level") == "3":
            sizes[_text(folder / "shared_cpu_list")] = _text(folder / "size")
    return sum(int(size.rstrip("K")) * 1024 for size in sizes.values() if size.rstrip("K").isdigit())


def _processor() -> str:
    names = (line for line in _text(Path("/proc/cpuinfo")).splitlines() if line.startswith("model name"))
    return next((line.split(":", 1)[1].strip() for line in names), platform.processor() or platform.machine())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
