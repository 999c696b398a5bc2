"""Inductor's folder is not writable -> an error with folder, reason and next step, not a C++ compiler's."""
from __future__ import annotations

import errno
import os
import stat
import tempfile
import time

import pytest
import torch
from torch import nn

from hpml_compiler.compile.lower import inductor_cache_dir
from hpml_compiler.compile.lower.inductor_cache_dir import check_cache_dir
from hpml_compiler.compile.lower.lowering import Lowering, boxed
from passes import compat
from passes.errors import BadInput
from passes.session_state import state
from tests.hpml_compiler.compile.lower.test_regional_compile import traced

pytestmark = pytest.mark.timeout(60)
FULL = os.strerror(errno.ENOSPC)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where inductor is to write: not tried yet."""
    monkeypatch.setitem(state._parts, inductor_cache_dir._WritableFolders, inductor_cache_dir._WritableFolders())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    return tmp_path / "code"


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), torch.ones(4, 3)


def says(error: pytest.ExceptionInfo, where: object, why: str) -> None:
    """It may be inside of Dynamo's."""
    text = str(error.value)
    assert f"compiled code cannot be written: {why}" in text and f"where: {where}" in text
    assert "TORCHINDUCTOR_CACHE_DIR" in text and "TMPDIR" in text


def test_a_folder_that_can_only_be_read_is_told_before_anything_is_compiled(folder, monkeypatch):
    write = tempfile.TemporaryFile

    def only_read(dir):
        if dir == str(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), dir)
        return write(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", only_read)
    model, x = small()
    start = time.monotonic()
    with pytest.raises(Exception) as error:
        torch.compile(model, backend="hpml")(x)
    says(error, folder, os.strerror(errno.EROFS))
    assert time.monotonic() - start < 20, "half a minute passes until the C++ compiler has given up"


def test_so_it_is_for_the_graph_of_one_of_several_ranks(folder):
    folder.parent.joinpath("file").write_text("not a folder")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inside = str(folder.parent / "file" / "code")
    with pytest.raises(BadInput) as error:
        Lowering("inductor").inference(traced(lambda x: (x.sin(),), torch.ones(4)))
    says(error, inside, os.strerror(errno.ENOTDIR))


def test_a_temporary_folder_that_is_gone_is_named(folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder / "gone"))
    folder.mkdir()
    folder.joinpath("gone").write_text("not a folder")
    with pytest.raises(BadInput) as error, check_cache_dir():
        raise AssertionError("nothing is compiled")
    says(error, folder / "gone", os.strerror(errno.ENOTDIR))


def out_of_room(*_, **__):
    raise RuntimeError(f"C++ compile error\n\nOutput:\n/tmp/ccN.s: Fatal error: can't write 8 bytes: {FULL}")


def test_a_disk_that_is_full_when_backward_is_compiled(folder, monkeypatch):
    model, x = small()
    halves = [lambda gm, *_, **__: boxed(gm.forward), out_of_room]
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *given, **more: halves.pop(0)(*given, **more))
    loss = torch.compile(model, backend="hpml")(x).sum()
    with pytest.raises(BadInput) as error:
        loss.backward()
    says(error, f"{folder} or ", FULL)


def test_a_disk_that_is_full_when_a_kernel_is_compiled_for_ranks(folder, monkeypatch):
    monkeypatch.setattr(compat, "compile_with_inductor", out_of_room)
    with pytest.raises(BadInput) as error:
        Lowering("inductor").inference(traced(lambda x: (x.sin(),), torch.ones(4)))
    says(error, f"{folder} or ", FULL)


def test_a_folder_in_it_that_belongs_to_somebody_else(folder):
    with pytest.raises(BadInput) as error, check_cache_dir():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "ab" / "kernel.cpp"))
    says(error, folder / "ab" / "kernel.cpp", os.strerror(errno.EACCES))


@pytest.mark.parametrize("other", [FileNotFoundError(errno.ENOENT, "No such file", "g++"), RuntimeError("C++ compile error"),
                                   PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/weights.pt")])
def test_what_has_another_cause_is_left_as_it_is(other):
    with pytest.raises(type(other)) as error, check_cache_dir():
        raise other
    assert error.value is other


def test_the_folder_is_made_for_this_user_alone(folder, monkeypatch):
    """Where torch has not made it before, which it does when Dynamo is imported."""
    monkeypatch.setattr(compat, "inductor_folder", lambda: str(folder))
    with check_cache_dir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_default_folder_that_others_may_have_written_is_left_for_one_of_ones_own(monkeypatch, tmp_path, caplog):
    """inductor runs what it finds there."""
    theirs = tmp_path / "torchinductor_user"
    theirs.mkdir()
    theirs.chmod(0o777)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("HPML_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compat, "inductor_folder", lambda: os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(theirs)))
    for _ in range(2):
        with check_cache_dir():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert stat.S_IMODE((tmp_path / "cache" / "inductor").stat().st_mode) == 0o700 and not any(theirs.iterdir())
    (said,) = caplog.messages
    assert "others may write" in said and str(theirs) in said
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(BadInput, match="no folder for compiled code is private to this user"), check_cache_dir():
        pass


def test_a_folder_that_the_user_names_is_taken_with_a_warning(folder, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    for _ in range(2):
        with check_cache_dir():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    (said,) = caplog.messages
    assert "another user may have written" in said and str(folder) in said
