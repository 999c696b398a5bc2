"""C++ kernels of a graph -> few invocations of the compiler, correct results."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

from passes.compat import deferred_cpp_kernels
from passes.compat.codegen import batch_cpp_kernels
from passes.compat.codegen.cut_off_libraries import is_whole

ADDS = """
#include <cstdint>
static constexpr int64_t BY = {number};
extern "C"  void kernel(const float* x, float* y, const int64_t n)
{{
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] + BY;  // {salt}
}}
"""
ARGUMENTS = ["const float*", "float*", "const int64_t"]
HALVES = "extern \"C\" void kernel(float* x)\n{ x[0] /= 2; }\n"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled(sources: dict[str, tuple[list[str], str]]) -> dict[str, Any]:
    """What a graph's code does: names of kernels, which are there when it was waited for."""
    with deferred_cpp_kernels():
        compiling = AsyncCompile()
        scope = {name: compiling.cpp_pybinding(arguments, code) for name, (arguments, code) in sources.items()}
        compiling.wait(scope)
    return scope


def adding(count: int, salt: str) -> dict[str, tuple[list[str], str]]:
    found = {f"add_{number}": (ARGUMENTS, ADDS.format(number=number, salt=salt)) for number in range(count)}
    return {**found, "halve": (["float*"], HALVES + f"// {salt}")}


def assert_right(called: dict[str, Any]) -> None:
    x = torch.arange(5.0)
    for name, call in called.items():
        if name == "halve":
            y = torch.full((1,), 3.0)
            call(y)
            assert y == 1.5
        else:
            y = torch.empty(5)
            call(x, y, 5)
            assert torch.equal(y, x + int(name.removeprefix("add_"))), name


@pytest.mark.parametrize("threads", [1, 4])
def test_kernels_share_libraries(threads, folder, monkeypatch):
    """Each with its own constant of one name."""
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    sources = adding(batch_cpp_kernels.MOST_KERNELS + 1, f"{threads} threads")
    assert_right(compiled(sources))
    libraries = sorted(folder.rglob("*.main.so"))
    assert len(libraries) == 2
    assert_right(compiled(sources))
    assert sorted(folder.rglob("*.main.so")) == libraries


def test_a_library_that_was_cut_off_is_compiled_again(folder, monkeypatch, caplog):
    """As where the process that compiled it was killed."""
    sources = adding(0, "cut off")
    compiled(sources)
    (library,) = folder.rglob("*.main.so")
    copied = folder / "copied" / library.relative_to(folder)
    copied.parent.mkdir(parents=True)
    written = library.read_bytes()
    for part in (written[:-1], written[:4096], b"", bytes(4096)):  # the linker writes the header last
        copied.write_bytes(part)
        assert not is_whole(str(copied))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "copied"))
    CppPythonBindingsCodeCache.cache_clear()
    assert_right(compiled(sources))
    assert is_whole(str(copied)) and f"{copied} is compiled again" in caplog.text


def test_a_header_that_was_cut_off_is_not_read(folder, monkeypatch, caplog, request):
    request.addfinalizer(codecache._precompile_header.cache_clear)
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", str(folder / "headers"))
    codecache._precompile_header.cache_clear()
    compiled(adding(0, "its header is compiled"))
    (header,) = (folder / "headers").rglob("*.gch")
    header.write_bytes(header.read_bytes()[:5000])
    assert_right(compiled(adding(0, "its header is cut off")))
    assert f"{header}, which the C++ compiler cannot read, is removed" in caplog.text and not header.exists()


def test_kernels_that_cannot_share_a_library_have_their_own(folder, monkeypatch):
    monkeypatch.setattr(batch_cpp_kernels._KernelLibrary, "source", lambda self: "this is no C++")
    assert_right(compiled(adding(2, "apart")))
    assert len(list(folder.rglob("*.main.so"))) == 3


def test_a_kernel_that_cannot_be_compiled_is_an_error():
    with pytest.raises(CppCompileError, match="no_such_name"):
        compiled({**adding(1, "wrong"), "wrong": (["float*"], HALVES.replace("2", "no_such_name"))})


def test_outside_kernels_are_compiled_as_inductor_does(folder):
    compiling = AsyncCompile()
    scope = {name: compiling.cpp_pybinding(*each) for name, each in adding(1, "outside").items()}
    compiling.wait(scope)
    assert_right(scope)
    assert len(list(folder.rglob("*.main.so"))) == 2
