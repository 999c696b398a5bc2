from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from passes.errors import BadInput
from passes.hardware.cluster import Cluster
from passes.hardware.device import DeviceSheet, builtin_devices, builtin_sheet, sheet_for_torch_name
from passes.json_records import FrozenMap


def test_builtin_devices_are_those_of_the_command_line():
    assert set(builtin_devices()) == {"cpu", "v100-32g", "a100-40g", "a100-80g", "h100-80g", "h200", "l4-24g"}
    for name in builtin_devices():
        sheet = builtin_sheet(name)
        assert sheet.device.name == name
        assert sheet.device.source and sheet.device.caches
        for link in (sheet.intra_node, sheet.inter_node, sheet.host, sheet.storage):
            assert link.source and "assumed" not in link.source
        group = Cluster.parse(f"1x8:{name}").group
        assert group.storage.device_bytes_per_s(8) < group.host.device_bytes_per_s(8)


def test_builtin_figures_are_dense_and_ordered():
    a100, h100, h200, l4 = (builtin_sheet(n).device for n in ("a100-80g", "h100-80g", "h200", "l4-24g"))
    assert a100.peak("bfloat16") == 312e12  # not 624, which is with sparsity
    assert a100.peak("float32") == 19.5e12 and a100.peak("tf32") == 156e12
    assert h100.peak("bfloat16") == pytest.approx(989e12, rel=1e-2)
    assert h200.peak("bfloat16") == h100.peak("bfloat16")
    assert h200.memory_bandwidth_bytes_per_s > h100.memory_bandwidth_bytes_per_s > a100.memory_bandwidth_bytes_per_s
    assert l4.memory_bytes < 24 * 2**30 < a100.memory_bytes < 80 * 2**30 < 141e9 < h200.memory_bytes


def test_peak_of_a_dtype_that_is_not_listed():
    v100 = builtin_sheet("v100-32g").device
    assert v100.peak("bfloat16") == v100.peak("float32")
    assert v100.peak("int64") == v100.peak("float32") / 2


@pytest.mark.parametrize(
    ("torch_name", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4-24g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("NVIDIA L40S", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_sheet_for_torch_name(torch_name, device):
    sheet = sheet_for_torch_name(torch_name)
    assert (sheet and sheet.device.name) == device


def test_device_file_round_trip(tmp_path):
    for name in builtin_devices():
        builtin_sheet(name).save(tmp_path / "sheet.json")
        assert DeviceSheet.load(tmp_path / "sheet.json") == builtin_sheet(name)


def test_records_are_hashable_and_picklable():
    sheet = builtin_sheet("h200")
    assert pickle.loads(pickle.dumps(sheet)) == sheet
    assert hash(sheet) == hash(pickle.loads(pickle.dumps(sheet)))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tpu"},
        {"memory_bytes": 0},
        {"peak_flops_per_s": FrozenMap(bfloat16=1e12)},
        {"peak_flops_per_s": FrozenMap(float32=-1.0)},
        {"matmul_efficiency": 1.1},
        {"idle_power_w": 1e6},
    ],
)
def test_device_refuses_impossible_figures(change):
    with pytest.raises(BadInput, match="device 'h200'"):
        replace(builtin_sheet("h200").device, **change)


def test_link_shares_its_ports():
    link = builtin_sheet("v100-32g").inter_node  # one NIC for two devices
    alone, both = link.device_bytes_per_s(1), link.device_bytes_per_s(8)
    assert alone == link.bandwidth_bytes_per_s * link.efficiency
    assert both == alone / 2
    for change in ({"latency_us": 0.0}, {"shared_by": 0}, {"efficiency": 1.5}, {"slowdown": FrozenMap(all_reduce=0.0)}):
        with pytest.raises(BadInput, match="InfiniBand"):
            replace(link, **change)
