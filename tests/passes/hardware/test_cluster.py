from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from passes.errors import BadInput
from passes.hardware.cluster import Cluster, builtin_devices, builtin_sheet
from passes.hardware.control_groups import available_cores, memory_bytes
from passes.json_records import to_json


def test_parse():
    cluster = Cluster.parse("8x4:h100-80g")
    assert (cluster.nodes, cluster.devices_per_node, cluster.world_size) == (8, 4, 32)
    assert cluster.device.name == "h100-80g"
    assert cluster.intra_node.bandwidth_bytes_per_s == 450e9 and cluster.inter_node.bandwidth_bytes_per_s == 50e9
    assert str(cluster) == "8x4:h100-80g" and Cluster.parse(str(cluster)) == cluster


@pytest.mark.parametrize("text", ["8x8", "h100-80g", "x8:h100-80g", "", "-1x8:cpu"])
def test_parse_says_the_form_and_lists_the_devices(text):
    with pytest.raises(BadInput) as error:
        Cluster.parse(text)
    assert repr(text) in error.value.what and "NODESxDEVICES:DEVICE" in error.value.next_step
    assert all(name in error.value.next_step for name in builtin_devices())


def test_parse_unknown_device_and_empty_cluster():
    with pytest.raises(BadInput, match="unknown device 'h300'") as error:
        Cluster.parse("8x8:h300")
    assert all(name in error.value.next_step for name in builtin_devices())
    with pytest.raises(BadInput, match="at least one node"):
        Cluster.parse("0x8:cpu")


def test_cluster_file_round_trip(tmp_path):
    path = tmp_path / "cluster.json"
    cluster = Cluster.parse("2x8:a100-80g")
    cluster.save(path)
    assert Cluster.load(path) == cluster and Cluster.parse(str(path)) == cluster


def test_files_may_name_devices(tmp_path):
    sheet = builtin_sheet("a100-40g")
    own = replace(sheet, device=replace(sheet.device, name="own", matmul_efficiency=0.5))
    own.save(tmp_path / "own.json")
    assert Cluster.parse(f"2x8:{tmp_path / 'own.json'}") == Cluster.homogeneous(2, 8, own)
    groups = [
        {"nodes": 1, "devices_per_node": 4, "device": "own.json"},
        {"nodes": 2, "devices_per_node": 8, "device": "h200", "inter_node": to_json(sheet.inter_node)},
    ]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"groups": groups}))
    mixed = Cluster.load(path)
    assert [g.device.name for g in mixed.groups] == ["own", "h200"]
    assert mixed.groups[1].inter_node == sheet.inter_node
    assert mixed.groups[1].intra_node == builtin_sheet("h200").intra_node
    assert mixed.world_size == 20 and str(mixed) == "1x4:own + 2x8:h200"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"devices": 8}, "unknown key 'devices' in NodeGroup"),
        ({"nodes": "2"}, "groups[0]: nodes"),
        ({"device": "h300"}, "unknown device 'h300'"),
        ({"device": {"name": "x"}}, "missing key"),
    ],
)
def test_cluster_file_is_strict(tmp_path, change, says):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"groups": [{"nodes": 2, "devices_per_node": 8, "device": "h200", **change}]}))
    with pytest.raises(BadInput) as error:
        Cluster.load(path)
    assert says in str(error.value)


def test_mixed_cluster_has_no_single_device():
    a, b = Cluster.parse("1x4:a100-40g"), Cluster.parse("1x4:v100-32g")
    mixed = Cluster(a.groups + b.groups)
    assert mixed.world_size == 8
    with pytest.raises(BadInput, match="2 groups"):
        _ = mixed.device
    with pytest.raises(BadInput, match="at least one group"):
        Cluster(())


def test_local_cpu_ranks_share_the_machine():
    one, many = Cluster.local(1, "cpu"), Cluster.local(64 * available_cores(), "cpu")
    ranks = many.world_size
    assert (many.nodes, many.devices_per_node) == (1, ranks)
    assert one.device.memory_bytes == memory_bytes()
    assert many.device.memory_bytes * ranks == pytest.approx(one.device.memory_bytes, rel=1e-3)
    assert one.device.peak("float32") == pytest.approx(available_cores() * builtin_sheet("cpu").device.peak("float32"))
    assert many.device.peak("float32") * ranks == pytest.approx(one.device.peak("float32"))
    total = many.device.memory_bandwidth_bytes_per_s * ranks
    assert total == pytest.approx(one.device.memory_bandwidth_bytes_per_s) and total <= 200e9
    # ranks beyond the cores take turns
    assert many.intra_node.latency_us == pytest.approx(64 * one.intra_node.latency_us)
    assert many.intra_node.bandwidth_bytes_per_s == pytest.approx(one.intra_node.bandwidth_bytes_per_s / 64)


def test_local_cuda_by_torch_name():
    cluster = Cluster.local(16, "cuda", device_name="NVIDIA H100 80GB HBM3", devices_per_node=8, memory_bytes=10**10)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.device == replace(builtin_sheet("h100-80g").device, memory_bytes=10**10)
    with pytest.warns(UserWarning, match="RTX 4090"):
        assert Cluster.local(2, "cuda", device_name="NVIDIA GeForce RTX 4090").device.name == "a100-40g"


def test_local_refuses():
    with pytest.raises(BadInput, match="legal types: cpu, cuda"):
        Cluster.local(2, "mps")
    with pytest.raises(BadInput, match="6 ranks are no whole number of nodes with 4"):
        Cluster.local(6, "cpu", devices_per_node=4)


def test_text_of_several_groups():
    mixed = Cluster.parse(" 1x4:h100-80g+2x8:a100-80g ")
    assert mixed.groups == Cluster.parse("1x4:h100-80g").groups + Cluster.parse("2x8:a100-80g").groups
    assert Cluster.parse(str(mixed)) == mixed
    assert Cluster.parse("4:h100-80g+2x8:a100-80g") == mixed
    with pytest.raises(BadInput, match="cannot read 'h100-80g' as a cluster in 'h100-80g") as error:
        Cluster.parse("h100-80g+1x4:a100-80g")
    assert "joined by +" in error.value.next_step
    with pytest.raises(BadInput, match="unknown device 'h300'"):
        Cluster.parse("1x4:h100-80g+1x4:h300")


@pytest.mark.parametrize(("given", "meant"), [
    ("1x8:h100", "h100-80g"), ("8:H100", "h100-80g"), ("1x8:a100", "a100-40g or a100-80g"), ("2x2:v100_32g", "v100-32g"),
    ("1x8:h100-80gb", "h100-80g"), ("h100", "1x8:h100-80g"), ("h200", "1x8:h200"), ("8x:l4", "1x8:l4-24g")])
def test_a_device_that_is_nearly_called_so_is_suggested(given, meant):
    with pytest.raises(BadInput, match=f"did you mean {re.escape(meant)}\\?"):
        Cluster.parse(given)


@pytest.mark.parametrize("given", ["1x8:tpu", "1x8:", "x", "", "8", ":"])
def test_where_nothing_is_alike_nothing_is_suggested(given):
    with pytest.raises(BadInput) as error:
        Cluster.parse(given)
    assert "did you mean" not in error.value.what


def test_devices_of_one_node():
    assert Cluster.parse("4:h100-80g") == Cluster.parse("1x4:h100-80g")
    assert str(Cluster.parse("4:h100-80g")) == "1x4:h100-80g"


def test_a_plus_in_the_name_of_a_file_joins_nothing(tmp_path):
    builtin_sheet("h200").save(tmp_path / "a+b.json")
    assert Cluster.parse(f"1x2:{tmp_path / 'a+b.json'}").device.name == "h200"


def test_between_groups_counts_the_slower_link_and_the_longer_latency():
    mixed = Cluster.parse("1x8:v100-32g+1x8:l4-24g")
    v100, l4 = (group.inter_node for group in mixed.groups)
    link = mixed.between_groups
    assert link is not None and link.device_bytes_per_s(8) == min(v100.device_bytes_per_s(8), l4.device_bytes_per_s(8))
    assert link.latency_us == max(v100.latency_us, l4.latency_us)
    inside = Cluster(mixed.groups, same_node=True).between_groups
    assert inside is not None and inside.name == mixed.groups[1].intra_node.name  # PCIe, no NVLink
    assert Cluster(mixed.groups, between_groups=v100).between_groups == v100
    assert Cluster.parse("1x8:l4-24g").between_groups is None


def test_between_groups_survives_a_file(tmp_path):
    for cluster in (Cluster.parse("1x8:v100-32g+1x8:l4-24g"),
                    Cluster(Cluster.parse("1x8:v100-32g+1x4:cpu").groups, same_node=True)):
        cluster.save(tmp_path / "mixed.json")
        assert Cluster.load(tmp_path / "mixed.json") == cluster


def test_groups_of_one_node_have_one_node_each():
    groups = Cluster.parse("2x4:a100-40g+1x4:v100-32g").groups
    with pytest.raises(BadInput, match="same_node"):
        Cluster(groups, same_node=True)
    with pytest.raises(BadInput, match="there is one"):
        Cluster(groups[1:], same_node=True)


def test_files_without_host_and_storage_still_load(tmp_path):
    full = to_json(builtin_sheet("h200"))
    old = {key: full[key] for key in ("device", "intra_node", "inter_node")}
    (tmp_path / "old.json").write_text(json.dumps(old))
    group = Cluster.parse(f"1x2:{tmp_path / 'old.json'}").group
    assert "assumed" in group.host.source and "assumed" in group.storage.source
    cpu = {"groups": [{"nodes": 1, "devices_per_node": 2, **{
        key: to_json(builtin_sheet("cpu"))[key] for key in ("device", "intra_node", "inter_node")}}]}
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    assert Cluster.load(tmp_path / "cpu.json").group.host.name == "memory of the host"  # no PCIe
