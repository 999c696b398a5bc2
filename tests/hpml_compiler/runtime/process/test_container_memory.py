"""Limits of control groups: folders of /sys/fs/cgroup -> bytes that are left."""
from __future__ import annotations

import pytest

from hpml_compiler.runtime.process import container_memory, out_of_memory

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
    return container_memory.bytes_left(tmp_path / "mounts", tmp_path / "cgroup")


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


def test_room_is_at_most_what_the_container_leaves(monkeypatch):
    monkeypatch.setattr(container_memory, "bytes_left", lambda: 12345)
    assert out_of_memory.room_bytes() == 12345
    monkeypatch.setattr(container_memory, "bytes_left", lambda: None)
    assert out_of_memory.room_bytes() > 12345
