"""Discovery: facts of nodes -> the cluster they make, which planning reads back."""
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler import cli
from hpml_compiler.commands.doctor import doctor
from hpml_compiler.instruments.discovery import node_facts, peak_rates
from hpml_compiler.instruments.discovery.cluster_discovery import describe, discover, merge
from hpml_compiler.instruments.discovery.node_facts import GpuFacts, NodeFacts, Port, nvml_links, read_infiniband, read_l3_bytes
from hpml_compiler.instruments.discovery.peak_rates import MeasuredKernel, corrected
from passes.cost_model import RooflineCost
from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.control_groups import memory_bytes
from passes.hardware.device import builtin_sheet
from passes.hardware.mesh import Mesh

ETHERNET = Port("eth0", 10e9 / 8, infiniband=False)
PLAIN = NodeFacts("a", "a processor", 16, 64 * 2**30, 0, (), (), 0)
A100 = GpuFacts("NVIDIA A100-SXM4-80GB", 80 * 2**30, 300e9, 32e9)
V100 = GpuFacts("Tesla V100-SXM2-32GB", 32 * 2**30, 150e9, 16e9)


def how(discovery, what: str) -> list[str]:
    return [finding.how for finding in discovery.findings if finding.what == what]


def test_this_machine_has_a_cluster_that_reads_back(tmp_path):
    found = discover().cluster
    found.save(tmp_path / "here.json")
    assert Cluster.parse(str(tmp_path / "here.json")) == found
    if not torch.cuda.device_count():
        assert found.device.kind == "cpu" and found.nodes == 1
        total = found.device.memory_bytes * found.world_size
        assert total == pytest.approx(memory_bytes(), rel=1e-3)


def test_ranks_without_gpus_share_the_cores():
    found = describe([replace(PLAIN, local_ranks=2, l3_bytes=64_000_000, ports=(ETHERNET,))])
    group = found.cluster.group
    assert (group.nodes, group.devices_per_node, group.device.kind) == (1, 2, "cpu")
    assert group.device.memory_bytes == 32 * 2**30
    assert group.device.caches[0].bytes == 16_000_000
    assert group.inter_node.device_bytes_per_s(2) == pytest.approx(10e9 / 8 / 2 * group.inter_node.efficiency)
    assert how(found, "link between nodes") == ["read"] and how(found, "link inside a node") == ["assumed"]


def test_nodes_that_are_alike_make_one_group():
    nodes = [replace(PLAIN, hostname=name, gpus=(A100,) * 8, ports=(ETHERNET,), local_ranks=8) for name in "abcd"]
    group = describe(nodes).cluster.group
    assert (group.nodes, group.devices_per_node, group.device.name) == (4, 8, "a100-80g")
    assert group.device.memory_bytes == 80 * 2**30
    assert group.intra_node.bandwidth_bytes_per_s == 300e9 and group.host.bandwidth_bytes_per_s == 32e9


def test_unlike_nodes_make_groups_and_so_do_unlike_gpus_of_one_node():
    apart = describe([replace(PLAIN, gpus=(A100,) * 4), replace(PLAIN, hostname="b", gpus=(V100,) * 2)]).cluster
    assert [(g.nodes, g.devices_per_node, g.device.name) for g in apart.groups] == [
        (1, 4, "a100-80g"), (1, 2, "v100-32g")]
    assert not apart.same_node
    together = describe([replace(PLAIN, gpus=(A100, V100, A100))]).cluster
    assert [(g.devices_per_node, g.device.name) for g in together.groups] == [(2, "a100-80g"), (1, "v100-32g")]
    assert together.same_node and together.between_groups is not None
    assert together.between_groups.bandwidth_bytes_per_s == 150e9  # the slower NVLink


def test_links_follow_what_the_system_has():
    infiniband = tuple(Port(f"mlx5_{i}/1", 25e9, infiniband=True) for i in range(4))
    node = replace(PLAIN, gpus=(A100,) * 8, ports=(*infiniband, ETHERNET))
    group = describe([node]).cluster.group
    assert group.inter_node.shared_by == 2 and group.inter_node.bandwidth_bytes_per_s == 25e9
    no_nvlink = describe([replace(node, gpus=(replace(A100, nvlink_bytes_per_s=0.0),) * 2)]).cluster.group
    assert no_nvlink.intra_node.bandwidth_bytes_per_s == 32e9 and "PCIe" in no_nvlink.intra_node.name
    unread = describe([replace(node, gpus=(GpuFacts(A100.name, A100.memory_bytes),) * 2, ports=())])
    assert unread.cluster.group.intra_node == builtin_sheet("a100-80g").intra_node
    assert how(unread, "link inside a node") == how(unread, "link between nodes") == ["assumed"]


def test_a_gpu_that_is_not_built_in_says_so():
    found = describe([replace(PLAIN, gpus=(GpuFacts("NVIDIA Nonesuch", 10 * 2**30),))])
    assert found.cluster.device.name == "NVIDIA Nonesuch" and found.cluster.device.memory_bytes == 10 * 2**30
    assert any("not built in" in f.value and f.how == "assumed" for f in found.findings)


def test_ranks_of_one_node_count_once():
    nodes, measured = merge([(PLAIN, [MATMUL]), (PLAIN, []), (replace(PLAIN, hostname="b"), [])])
    assert [node.hostname for node in nodes] == ["a", "b"]
    assert measured == {"a": [MATMUL], "b": []}


MATMUL = MeasuredKernel("matmul", "bfloat16", 2.0 * 512**3, 6.0 * 512**2, 5000.0)
ADDITION = MeasuredKernel("pointwise", "float32", 2.0**25, 2.0**28, 50_000.0)


@pytest.mark.parametrize("name", ["cpu", "h100-80g"])
def test_a_corrected_device_predicts_what_was_measured(name):
    device = builtin_sheet(name).device
    matmul, addition = (replace(m, flops=m.flops * s, bytes_moved=m.bytes_moved * s) for m, s in (
        (MATMUL, 1 if name == "cpu" else 5e3), (ADDITION, 1 if name == "cpu" else 3e2)))
    after = corrected(device, [matmul, addition])
    cost = RooflineCost(after, Mesh((), after))
    for each in (matmul, addition):
        assert cost.compute_us(each.flops, each.bytes_moved, each.dtype, each.kind) == pytest.approx(each.us, rel=0.01)
    assert "measured here" in after.source


def test_what_one_core_does_is_shared_out_among_the_ranks():
    node = replace(PLAIN, cores=4)
    few = describe([replace(node, local_ranks=2)], {"a": [MATMUL]}).cluster.device
    many = describe([replace(node, local_ranks=8)], {"a": [MATMUL]}).cluster.device
    assert few.peak("bfloat16") == pytest.approx(4 * many.peak("bfloat16"), rel=0.02)


def test_measuring_is_quick_and_plausible():
    found = peak_rates.measure("cpu", seconds=0.05)
    assert {(m.kind, m.dtype) for m in found} == {
        ("matmul", "float32"), ("matmul", "bfloat16"), ("matmul", "float64"), ("pointwise", "float32")}
    assert all(m.us > 0 and 1e8 < m.flops / m.us * 1e6 < 1e16 for m in found)


class FakeNvml:
    """NVML of a GPU with 12 links of version 4 (NVLink 3), one of them down, and PCIe 4 x16."""

    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= 12:
            raise self.NVMLError("not supported")
        return int(link != 3)

    def nvmlDeviceGetNvLinkVersion(self, handle: str, link: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16


def test_nvml_counts_links():
    assert nvml_links(FakeNvml(), "GPU-1") == (11 * 25e9, 32e9)
    assert nvml_links(FakeNvml(), "GPU-2") == (0.0, 0.0)


def test_sysfs(tmp_path):
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE"), ("mlx5_1/ports/1", "1: DOWN")):
        folder = tmp_path / "class/infiniband" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert read_infiniband(tmp_path) == (Port("mlx5_0/1", 25e9, infiniband=True),)
    for cpu in range(4):  # two pairs of cores, each with a cache of its own
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/cache/index3"
        folder.mkdir(parents=True)
        for name, text in (("level", "3"), ("size", "1024K"), ("shared_cpu_list", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")):
            (folder / name).write_text(text + "\n")
    assert read_l3_bytes(tmp_path) == 2 * 2**20
    assert read_l3_bytes(tmp_path / "nothing") == 0


def test_interfaces_leave_out_what_is_software(monkeypatch):
    stats = psutil.net_if_stats()["lo"]
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {
        "lo": stats, "docker0": stats._replace(isup=True), "eth1": stats._replace(isup=False, speed=10),
        "eth0": stats._replace(isup=True, speed=10_000), "eth2": stats._replace(isup=True, speed=25_000)})
    assert node_facts.read_interfaces() == (Port("eth2", 25e9 / 8, False), Port("eth0", 10e9 / 8, False))


def _doctor(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    return int(exit.value.code or 0), captured.out, captured.err


def test_doctor_writes_a_cluster_that_plans_are_made_for(capsys, tmp_path):
    path = tmp_path / "here.json"
    code, out, err = _doctor(capsys, "--cluster", "--json", "--save", str(path))
    assert code == 0, err
    report = json.loads(out)
    assert {f["how"] for f in report["findings"]} <= {"measured", "read", "assumed"}
    assert report["cluster"] == json.loads(path.read_text())
    plan = hpml_compiler.plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(8, 8),
                              cluster=str(path))
    assert plan.predicted.step_time_us > 0


def test_doctor_prints_a_table_and_refuses_what_makes_no_sense(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = _doctor(capsys, "--cluster")
    assert code == 0 and "assumed" in out and "read" in out, err
    code, _, err = _doctor(capsys, "--measure")
    assert code == 2 and "add --cluster" in err
    with pytest.raises(BadInput, match="needs the suffix .json"):
        doctor(cluster=True, save=Path("here.txt"))


def test_under_torchrun_the_first_rank_tells_for_all(tmp_path):
    path = tmp_path / "both.json"
    done = subprocess.run(
        [sys.executable, "-m", "hpml_compiler.cli", "run", "--nproc", "2", "-m", "hpml_compiler.cli", "doctor",
         "--cluster", "--json", "--save", str(path)],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == 1
    found = Cluster.parse(str(path))
    assert found.nodes == 1
    if not torch.cuda.device_count():
        assert found.devices_per_node == 2
