"""Writing files: atomic for regular files, direct for devices, pipes and streams."""
from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from passes.errors import BadInput
from passes.filesystem.text_files import check_writable, write_file

pytestmark = pytest.mark.timeout(60)


def test_a_new_file_and_an_older_one(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, "first", "the text")
    path.chmod(0o640)
    write_file(path, b"second", "the text")
    assert path.read_text() == "second" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a.txt", "text", "the text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


def test_a_link_goes_on_pointing_to_its_file(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "a.txt")  # which is not there yet
    write_file(link, "text", "the text")
    assert link.is_symlink() and (tmp_path / "real" / "a.txt").read_text() == "text"


def test_a_long_name_that_the_disk_takes(tmp_path):
    write_file(tmp_path / ("n" * 250), "text", "the text")
    assert (tmp_path / ("n" * 250)).read_text() == "text"


@pytest.mark.parametrize("link", [False, True])
def test_devices_stay_devices(tmp_path, link):
    for name in ("null", "full"):
        path = Path("/dev", name)
        if link:
            path = tmp_path / name
            path.symlink_to(f"/dev/{name}")
        if name == "null":
            write_file(path, "text", "the text")
        else:
            with pytest.raises(BadInput, match="cannot write the text: No space left") as caught:
                write_file(path, "text", "the text")
            assert "another disk" in caught.value.next_step
        assert stat.S_ISCHR(path.stat().st_mode) and path.is_symlink() == link


def test_a_pipe_is_written_through(tmp_path):
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    write_file(path, "text" * 100_000, "the text")
    reader.join(30)
    assert found == ["text" * 100_000] and stat.S_ISFIFO(path.stat().st_mode)


def test_standard_output_keeps_what_was_printed_before_and_after(tmp_path):
    """Also where it is a file: opened by its name, that would be cut off."""
    code = ("from passes.filesystem.text_files import write_file; print('before', end=' '); "
            "write_file('/dev/stdout', 'between ', 'the text'); print('after')")
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=50)
    assert (tmp_path / "out").read_text() == "before between after\n"


@pytest.mark.parametrize(("name", "said"), [
    ("none/a.txt", "no folder"), ("file/a.txt", "no folder"), ("folder", "directory"), ("n" * 300, "too long"),
    ("a\0b", "null")])
def test_what_cannot_be_written_is_known_before_and_after(tmp_path, name, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for act in (lambda path: check_writable(path, "the text"), lambda path: write_file(path, "text", "the text")):
        with pytest.raises(BadInput, match=said) as caught:
            act(str(tmp_path / name))
        assert caught.value.where and caught.value.next_step
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_full_disk_leaves_the_older_file_and_nothing_half(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_file(path, "first", "the text")
    real = os.fdopen

    class Full:
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *_): self.file.close()

        def write(self, data):
            self.file.write(bytes(data)[:2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdopen", lambda *args, **options: Full(real(*args, **options)))
    with pytest.raises(BadInput, match="No space left"):
        write_file(path, "second", "the text")
    assert path.read_text() == "first" and [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_writable_says_nothing_of_what_can_be_written(tmp_path):
    for path in (None, tmp_path / "new", "/dev/null", "/dev/stdout", "/dev/full"):
        check_writable(path, "the text")
