"""docs/clusters.md: its examples load, and its tables name every field that there is."""
from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from passes.hardware.cluster import Cluster, NodeGroup, builtin_devices
from passes.hardware.device import Cache, Device, Link
from passes.hardware.mesh import mesh_from_pin

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```json (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_cluster_of_the_page_loads(folder):
    cluster = Cluster.parse(str(folder / "cluster.json"))
    assert [(g.nodes, g.devices_per_node, g.device.name) for g in cluster.groups] == [(2, 8, "h100-80g"), (1, 4, "own")]
    assert cluster.groups[1].inter_node.shared_by == 2 and cluster.groups[1].storage.name == "NVMe"
    assert cluster.between_groups is not None and cluster.between_groups.latency_us == 20.0


def test_the_device_of_the_page_can_be_planned_for(folder):
    cluster = Cluster.parse(f"2x4:{folder / 'own.json'}")
    assert mesh_from_pin({"dp": 2, "tp": 4}, cluster).device.caches == (Cache(48_000_000, 2.5e12),)


def test_the_texts_of_the_page_are_read():
    assert {g.device.name for g in Cluster.parse("1x4:h100-80g+1x4:a100-80g").groups} == {"h100-80g", "a100-80g"}


@pytest.mark.parametrize("record", [Cluster, NodeGroup, Link, Device])
def test_every_field_is_described(record):
    described = {name for row in re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(record)} <= described


def test_the_built_in_devices_are_all_named():
    assert set(re.findall(r"`([\w-]+)`", PAGE.split("Built-in devices:")[1].split(".")[0])) == set(builtin_devices())
