"""Limits of control groups: folders of /sys/fs/cgroup -> bytes that are left, memory and cores."""
from __future__ import annotations

import os

import psutil
import pytest

from passes.hardware import control_groups

GIB, NONE = 1 << 30, 9223372036854771712
V1 = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "cached": "total_inactive_file"}
V2 = {"limit": "memory.max", "used": "memory.current", "cached": "inactive_file"}


def _group(folder, names, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["used"]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 4096\n{names['cached']} {cached}\n")


def _left(tmp_path, memberships):
    (tmp_path / "cgroup").write_text(memberships)
    return control_groups.bytes_left(tmp_path / "mounts", tmp_path / "cgroup")


@pytest.mark.parametrize(("memberships", "root", "names"), [
    ("0::/pods/job\n", "", V2), ("9:name=systemd:/\n4:cpu,memory:/pods/job\n0::/\n", "memory", V1)])
def test_the_tightest_limit_counts_and_cached_files_are_free(tmp_path, memberships, root, names):
    mounts = tmp_path / "mounts" / root
    _group(mounts / "pods" / "job", names, "max" if names is V2 else NONE, 3 * GIB)
    assert _left(tmp_path, memberships) is None
    _group(mounts / "pods", names, 8 * GIB, 5 * GIB, 2 * GIB)
    assert _left(tmp_path, memberships) == 5 * GIB
    _group(mounts / "pods" / "job", names, 4 * GIB, 3 * GIB)
    assert _left(tmp_path, memberships) == GIB
    _group(mounts / "pods" / "job", names, 4 * GIB, 5 * GIB)
    assert _left(tmp_path, memberships) == 0


@pytest.mark.parametrize("memberships", ["", "0::/\n", "0::/../other\n", "4:memory:/host/path\n"])
def test_the_root_of_the_mount_is_the_group_of_a_container(tmp_path, memberships):
    assert _left(tmp_path, memberships) is None
    _group(tmp_path / "mounts", V2, 2 * GIB, GIB)
    _group(tmp_path / "mounts" / "memory", V1, 2 * GIB, GIB)
    assert _left(tmp_path, memberships) == (GIB if memberships else None)


def test_memory_is_that_of_the_tightest_limit(tmp_path):
    files = {"mounts": tmp_path / "mounts", "memberships": tmp_path / "cgroup"}
    files["memberships"].write_text("0::/pods/job\n")
    whole = control_groups.memory_bytes(**files)
    assert whole == psutil.virtual_memory().total
    _group(files["mounts"] / "pods", V2, whole + GIB, GIB)
    assert control_groups.memory_bytes(**files) == whole
    _group(files["mounts"] / "pods" / "job", V2, GIB, GIB)
    assert control_groups.memory_bytes(**files) == GIB


@pytest.mark.parametrize(("memberships", "root", "written"), [
    ("0::/pods/job\n", "", {"cpu.max": "{} 100000"}),
    ("4:cpu,cpuacct:/pods/job\n", "cpu", {"cpu.cfs_quota_us": "{}", "cpu.cfs_period_us": "100000"})])
def test_cores_are_as_many_whole_ones_as_the_quota_has(tmp_path, monkeypatch, memberships, root, written):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(64)})
    group = tmp_path / "mounts" / root / "pods"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(memberships)
    for quota, cores in {"max": 64, "-1": 64, "250000": 2, "50000": 1, "9900000": 64}.items():
        for name, text in written.items():
            (group / name).write_text(text.format(quota))
        assert control_groups.available_cores(tmp_path / "mounts", tmp_path / "cgroup") == cores, quota
