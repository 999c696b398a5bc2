"""Discover the cluster this runs on: groups of equal devices with their links, from the facts of every node.

Each figure of the result is measured, read from the system, or assumed from the built-in devices; `findings` lists
which. Under torchrun every rank must call `discover`, and all get the same result.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, cast

from hpml_compiler.instruments.discovery.node_facts import GpuFacts, NodeFacts, read_node
from hpml_compiler.instruments.discovery.peak_rates import MeasuredKernel, corrected, measure
from passes.hardware.cluster import LOCAL_MEMORY_BANDWIDTH_BYTES_PER_S, Cluster, NodeGroup
from passes.hardware.device import DeviceSheet, Link, builtin_sheet, sheet_for_torch_name

How = Literal["measured", "read", "assumed"]
UNKNOWN_GPU = "a100-40g"  # rates for GPUs that are not built in
MOST_CPU_RANKS = 4  # the number that `hpml run` starts without GPUs


@dataclass(frozen=True)
class Finding:
    """One line of the report on the cluster."""

    what: str
    value: str
    how: How


@dataclass(frozen=True)
class Discovery:
    cluster: Cluster
    findings: tuple[Finding, ...]


def discover(measure_peaks: bool = False) -> Discovery:
    """Discover this node, and under torchrun all others; with measure_peaks also measure the devices' rates (under 10 s).

    The first rank of each node measures one GPU or one core.
    """
    here = read_node()
    device_type = "cuda" if here.gpus else "cpu"
    measured = measure(device_type) if measure_peaks and int(os.environ.get("LOCAL_RANK", "0")) == 0 else []
    return describe(*_gather(here, measured))


def describe(nodes: list[NodeFacts], measured: dict[str, list[MeasuredKernel]] | None = None) -> Discovery:
    """Build the cluster of these nodes, in their order. measured: hostname -> measurements of that node's devices.

    Nodes with the same facts form a group; a node with different GPUs becomes several groups. Groups of one node are
    connected by the slower of their links inside the node.
    """
    findings: list[Finding] = []
    alike: dict[tuple, list[NodeFacts]] = {}
    for node in nodes:
        alike.setdefault((node.processor, node.cores, node.gpus, node.ports, node.local_ranks), []).append(node)
    groups: list[NodeGroup] = []
    for each in alike.values():
        first = each[0]
        found = (measured or {}).get(first.hostname, [])
        where = first.hostname if len(each) == 1 else f"{first.hostname} and {len(each) - 1} like it"
        findings.append(Finding(where, f"{first.processor}, {first.cores} cores, {first.memory_bytes / 2**30:.1f} GiB", "read"))
        findings += [Finding(where, remark, "assumed") for remark in first.remarks]
        kinds: dict[str, list[GpuFacts]] = {}
        for gpu in first.gpus:
            kinds.setdefault(gpu.name, []).append(gpu)
        if kinds:
            for gpus in kinds.values():
                count = len(gpus) if len(kinds) > 1 or not first.local_ranks else min(len(gpus), first.local_ranks)
                groups.append(_group(len(each), count, _gpu_sheet(gpus[0], findings), first, found, findings))
        else:
            ranks = first.local_ranks or min(first.cores, MOST_CPU_RANKS)
            groups.append(_group(len(each), ranks, _cpu_sheet(first, ranks, findings), first, found, findings))
    cluster = Cluster(tuple(groups), same_node=len(groups) > 1 and len(nodes) == 1)
    return Discovery(cluster, tuple(findings))


def _group(
    nodes: int, devices: int, sheet: DeviceSheet, node: NodeFacts, measured: list[MeasuredKernel], findings: list[Finding]
) -> NodeGroup:
    name = sheet.device.name
    if measured:
        cores = 1.0 if sheet.device.kind == "cuda" else node.cores / devices
        scaled = [replace(m, flops=m.flops * cores, bytes_moved=m.bytes_moved * cores) for m in measured]
        device = corrected(sheet.device, scaled)
        if device.kind == "cpu":  # the cores share the memory's bandwidth
            most = LOCAL_MEMORY_BANDWIDTH_BYTES_PER_S / devices
            bandwidth = min(device.memory_bandwidth_bytes_per_s, most)
            device = replace(device, memory_bandwidth_bytes_per_s=bandwidth)
        sheet = replace(sheet, device=device)
        what = f"{name}: one core of {node.cores}" if device.kind == "cpu" else name
        findings += [Finding(what, str(m), "measured") for m in measured]
    else:
        findings.append(Finding(name, f"rates: {sheet.device.source}", "assumed"))
    sheet = replace(sheet, inter_node=_inter_node(sheet, node, devices, findings))
    findings.append(Finding(name, f"host link: {sheet.host.name}, {_rate(sheet.host)}; storage: {sheet.storage.name}, "
                            f"{_rate(sheet.storage)}", "assumed"))
    return NodeGroup.of(nodes, devices, sheet)


def _cpu_sheet(node: NodeFacts, ranks: int, findings: list[Finding]) -> DeviceSheet:
    group = Cluster.local(ranks, "cpu").group
    device = replace(group.device, memory_bytes=node.memory_bytes // ranks)
    findings.append(Finding("devices", f"{ranks} ranks share the cores and the memory; no GPU", "read"))
    if node.l3_bytes and device.caches:
        # Ranks share it, and about half of it is effective for a kernel, as measured for the built-in cpu.
        size = node.l3_bytes // (2 * ranks)
        device = replace(device, caches=(replace(device.caches[-1], bytes=size),))
        findings.append(Finding("cache", f"{node.l3_bytes / 2**20:.0f} MiB at level 3, {size / 1e6:.1f} MB usable by a "
                                "rank", "read"))
    findings.append(Finding("link inside a node", f"{group.intra_node.name}, {_rate(group.intra_node)}", "assumed"))
    return DeviceSheet(device, group.intra_node, group.inter_node, "", group.host, group.storage)


def _gpu_sheet(gpu: GpuFacts, findings: list[Finding]) -> DeviceSheet:
    builtin = sheet_for_torch_name(gpu.name)
    sheet = builtin or builtin_sheet(UNKNOWN_GPU)
    device = replace(sheet.device, memory_bytes=gpu.memory_bytes)
    if builtin is None:
        device = replace(device, name=gpu.name, source=f"not built in, so as {UNKNOWN_GPU}: {device.source}")
        findings.append(Finding(gpu.name, f"not built in: rates, power and links of {UNKNOWN_GPU}", "assumed"))
    findings.append(Finding(device.name, f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB", "read"))
    intra, host = sheet.intra_node, sheet.host
    if gpu.nvlink_bytes_per_s:
        intra = Link("NVLink", intra.latency_us, gpu.nvlink_bytes_per_s, 1, 0.8, source="links counted by NVML; 0.8 "
                     "and latency: as in the built-in device file")
    elif gpu.pcie_bytes_per_s:
        intra = Link("PCIe through the host", max(intra.latency_us, 2.5), gpu.pcie_bytes_per_s, 1, 0.6, source="no "
                     "NVLink, PCIe as NVML says; 0.6 (no peer-to-peer path on most hosts) and latency: estimated")
    if gpu.pcie_bytes_per_s:
        host = replace(host, name="PCIe", bandwidth_bytes_per_s=gpu.pcie_bytes_per_s,
                       source=f"generation and lanes as NVML says; the rest: {host.source}")
    known = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
    findings.append(Finding("link inside a node", f"{intra.name}, {_rate(intra)}", "read" if known else "assumed"))
    return replace(sheet, device=device, intra_node=intra, host=host)


def _inter_node(sheet: DeviceSheet, node: NodeFacts, devices: int, findings: list[Finding]) -> Link:
    """InfiniBand if there is any, else the fastest interface whose speed is known, else the built-in link."""
    infiniband = [port for port in node.ports if port.infiniband]
    ethernet = [port for port in node.ports if not port.infiniband and port.bytes_per_s]
    link, how = sheet.inter_node, cast(How, "assumed")
    if infiniband:
        slowest = min(port.bytes_per_s for port in infiniband)
        link, how = Link(
            f"InfiniBand or RoCE, {len(infiniband)} ports per node", 4.0, slowest, max(1, -(-devices // len(infiniband))),
            0.9, source="ports and rates as the system says; 0.9 and latency: as in the built-in device files",
        ), "read"
    elif ethernet:
        link, how = replace(
            builtin_sheet("cpu" if sheet.device.kind == "cpu" else "l4-24g").inter_node, shared_by=max(devices, 1),
            name=f"Ethernet, {ethernet[0].name}", bandwidth_bytes_per_s=ethernet[0].bytes_per_s,
            source="speed as the system says; latency, efficiency and slowdown: as in the built-in device file",
        ), "read"
    findings.append(Finding("link between nodes", f"{link.name}, {_rate(link)}", how))
    return link


def _rate(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s one way"


def _gather(here: NodeFacts, measured: list[MeasuredKernel]) -> tuple[list[NodeFacts], dict[str, list[MeasuredKernel]]]:
    """Gather the facts of every node, once each and in order of rank, and its measurements."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return [here], {here.hostname: measured}
    import torch.distributed as dist

    from hpml_compiler.runtime.process.world_group import ensure_process_group

    everything: list = [None] * ensure_process_group()
    dist.all_gather_object(everything, (here, measured))
    return merge(everything)


def merge(
    everything: list[tuple[NodeFacts, list[MeasuredKernel]]]
) -> tuple[list[NodeFacts], dict[str, list[MeasuredKernel]]]:
    """Merge the ranks' facts and measurements by node."""
    nodes: dict[str, NodeFacts] = {}
    found: dict[str, list[MeasuredKernel]] = {}
    for node, measured in everything:
        nodes.setdefault(node.hostname, node)
        if measured or node.hostname not in found:
            found[node.hostname] = measured
    return list(nodes.values()), found
